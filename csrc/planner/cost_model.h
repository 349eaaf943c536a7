// Cost of an allreduce on a machine: closed forms with measured constants, corrected by measured
// allreduces. Pure functions.
//
// T = messages * alpha + wire bytes * beta, overlapped with coding and adding: max(wire, work) +
// the first segment of the smaller one. For a ring of p ranks and n elements of w bytes this is 2
// (p-1) alpha + 2 (p-1)/p n w beta (Hockney's model; Thakur et al., Optimization of collective
// communication operations in MPICH, IJHPCA 2005).
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "collectives/allreduce.h"
#include "quant/codec.h"

namespace qsgd {

// Time of a message of s bytes: alpha + s * beta, while every rank sends and receives.
struct Link {
  double alpha_s = 0;
  double beta_s_per_byte = 0;
  double operator()(double messages, double bytes) const {
    return messages * alpha_s + bytes * beta_s_per_byte;
  }
};

// Seconds per element, with all the threads of a rank.
struct CodecCost {
  CodecSpec spec;
  double encode_s = 0;
  double decode_s = 0;
  double decode_add_s = 0;
};

// A measured allreduce of `count` float32 elements.
struct Observation {
  Algorithm algorithm = Algorithm::kDirect;
  std::optional<CodecSpec> spec;  // if compressed
  size_t count = 0;
  double seconds = 0;
};

// Equal on every rank, so that every rank makes the same plan.
struct Machine {
  int ranks = 1;
  int ranks_per_node = 1;  // consecutive; 1 if the numbers differ between nodes
  // The algorithms of auto, uncompressed and compressed. They do not depend on a tensor's size, so
  // that a tensor gives the same bits with any fusion.
  Algorithm exact = Algorithm::kDirect;
  Algorithm coded = Algorithm::kSra;
  Link within;  // messages between the ranks of a node
  Link across;  // messages between nodes, while all ranks of a node send
  Link shared;  // one allreduce in shared memory, per byte of the tensor
  double add_s_per_byte = 0;
  std::vector<CodecCost> codecs;
  std::vector<Observation> observed;

  Algorithm resolve(Algorithm algorithm, bool compressed) const {
    if (algorithm != Algorithm::kAuto) return algorithm;
    return compressed ? coded : exact;
  }
  // Mean over the links to a rank's peers.
  Link link() const;
  // The measured algorithms; if none, the one of auto.
  std::vector<Algorithm> known(bool compressed) const;
  // Cost of the most similar measured code: same scheme and nearest bits; else the slowest.
  CodecCost codec(const CodecSpec& spec) const;
};

// Throws a usage error that names the field if a value is invalid.
void check(const Machine& machine);

// Seconds of one allreduce of `count` float32 elements, with `spec` for a compressed algorithm.
// kAuto stands for the machine's algorithm. Adds the difference between observations and the closed
// form, for the most similar code that was observed: interpolated linearly between the observed
// sizes and extrapolated beyond them.
double allreduce_s(const Machine& machine, Algorithm algorithm, size_t count,
                   const std::optional<CodecSpec>& spec);

// An optimistic estimate: beyond the last observation, no more is added than there. Used to choose
// trials, because extrapolations from a few small sizes are unreliable.
double optimistic_s(const Machine& machine, Algorithm algorithm, size_t count,
                    const std::optional<CodecSpec>& spec);

// Bytes that one rank sends in it.
double wire_bytes(const Machine& machine, Algorithm algorithm, size_t count,
                  const std::optional<CodecSpec>& spec);

}  // namespace qsgd
