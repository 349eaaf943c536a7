// What an allreduce costs on a machine: closed forms over measured constants, corrected by what
// some allreduces were seen to take. Pure functions.
//
// T = messages * alpha + wire bytes * beta, coding and adding overlapped with the wire:
// max(wire, work) + the lesser one's first segment. For the ring of p ranks and n elements of w
// bytes that is 2 (p-1) alpha + 2 (p-1)/p n w beta (Hockney's model; Thakur et al., Optimization
// of collective communication operations in MPICH, IJHPCA 2005).
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "collectives/allreduce.h"
#include "quant/codec.h"

namespace qsgd {

// Time of a message of s bytes: alpha + s * beta, with every rank sending and receiving at once.
struct Link {
  double alpha_s = 0;
  double beta_s_per_byte = 0;
  double operator()(double messages, double bytes) const {
    return messages * alpha_s + bytes * beta_s_per_byte;
  }
};

// Seconds per element, with all the threads that a rank codes with.
struct CodecCost {
  CodecSpec spec;
  double encode_s = 0;
  double decode_s = 0;
  double decode_add_s = 0;
};

// An allreduce of `count` float32, as it was measured.
struct Observation {
  Algorithm algorithm = Algorithm::kDirect;
  std::optional<CodecSpec> spec;  // of a compressed one
  size_t count = 0;
  double seconds = 0;
};

// Equal on every rank, so that every rank makes the same plan.
struct Machine {
  int ranks = 1;
  int ranks_per_node = 1;  // consecutive ranks; 1 also where nodes hold unequal numbers
  // What auto stands for here, uncompressed and compressed. It never depends on a tensor's size, so
  // that a tensor gives the same bits whatever it is fused with.
  Algorithm exact = Algorithm::kDirect;
  Algorithm coded = Algorithm::kSra;
  Link within;  // messages between the ranks of a node
  Link across;  // messages between nodes, all ranks of a node at it
  Link shared;  // one allreduce through a node's memory, per byte of the tensor
  double add_s_per_byte = 0;
  std::vector<CodecCost> codecs;
  std::vector<Observation> observed;

  int nodes() const { return ranks / ranks_per_node; }
  Algorithm resolve(Algorithm algorithm, bool compressed) const {
    if (algorithm != Algorithm::kAuto) return algorithm;
    return compressed ? coded : exact;
  }
  // The mean over a rank's peers.
  Link link() const;
  // Those that were measured; what auto stands for, where none was.
  std::vector<Algorithm> known(bool compressed) const;
  // Of the codec measured that is most like this one: same scheme and nearest bits, else the
  // slowest.
  CodecCost codec(const CodecSpec& spec) const;
};

// Throws a usage error that names the field when a value cannot be.
void check(const Machine& machine);

// Seconds of one allreduce of `count` float32; the spec is that of a compressed algorithm. kAuto is
// what the machine says. What observations of the algorithm, in the code that is most like this
// one, took beyond the closed form is added: on straight lines between their sizes and beyond.
double allreduce_s(const Machine& machine, Algorithm algorithm, size_t count,
                   const std::optional<CodecSpec>& spec);

// The same by a reader who hopes for the best: beyond the last observation no more is added than
// there. It says what is worth a trial, for lines through a few small sizes lead astray.
double hopeful_s(const Machine& machine, Algorithm algorithm, size_t count,
                 const std::optional<CodecSpec>& spec);

// Bytes that one rank sends in it.
double wire_bytes(const Machine& machine, Algorithm algorithm, size_t count,
                  const std::optional<CodecSpec>& spec);

}  // namespace qsgd
