// All algorithms of an allreduce, each with its C++ name and the one that settings use. Answers of
// rank 0 carry their numbers. Algorithm X is one file, which defines X_algorithm(); algorithm.h
// says of what it consists.
#pragma once

#define QSGD_ALGORITHMS(X)                  \
  X(kDirect, direct)                        \
  X(kRing, ring)                            \
  X(kRecursiveDoubling, recursive_doubling) \
  X(kRabenseifner, rabenseifner)            \
  X(kShared, shared)                        \
  X(kHierarchical, hierarchical)            \
  X(kLeaders, leaders)                      \
  X(kSra, sra)                              \
  X(kSra2d, sra2d)                          \
  X(kAllgather, allgather)                  \
  X(kRequantizingRing, requantizing_ring)   \
  X(kHierarchicalSra, hierarchical_sra)     \
  X(kLeadersSra, leaders_sra)
