#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/error.h"
#include "engine/lifeline.h"
#include "engine/operation.h"
#include "quant/codec.h"

void bind_engine(pybind11::module_& m);
void bind_operation(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
void bind_communicator(pybind11::module_& m);
void bind_spec(pybind11::module_& m);
void bind_threads(pybind11::module_& m);
void bind_bucket(pybind11::module_& m);

// The value with this name in the table.
template <class T, size_t N>
T look_up(const char* what, const std::string& name,
          const std::array<std::pair<const char*, T>, N>& table) {
  std::string known;
  for (const auto& [key, value] : table) {
    if (name == key) return value;
    known += (known.empty() ? "" : ", ") + std::string(key);
  }
  throw qsgd::usage_error("unknown " + std::string(what) + " '" + name + "'; known are " + known);
}

// Values by their names in Python; each function throws a usage error that lists the known names.
qsgd::DType parse_dtype(const std::string& name);
qsgd::ReduceOp parse_op(const std::string& name);
qsgd::OpKind parse_kind(const std::string& name);

// The connections of Communicator.watch() and Engine.watch(): descriptor, rank and label of each.
using Peers = std::vector<std::tuple<int, int, std::string>>;
std::vector<qsgd::Lifeline::Peer> peers_of(const Peers& peers);

// The code, or None for no compression.
using OptionalSpec = std::optional<qsgd::CodecSpec>;
