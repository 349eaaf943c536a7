// All allreduce algorithms, each with its C++ name and its name in settings. Their numbers are sent
// in responses of rank 0. The file of algorithm X defines X_algorithm(); see AlgorithmTraits.
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
