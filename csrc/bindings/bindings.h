// Common declarations of the bindings.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/error.h"
#include "engine/engine.h"
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

namespace qsgd {

// Deleter: releases the GIL, because the object's threads may need it to log while the destructor
// waits for them; a framework's thread that releases the object does not hold it. A forked child
// has the object without its threads, and would wait forever: it does not delete it.
template <class T>
struct DeleteWhereMade {
  pid_t owner = getpid();

  void operator()(T* object) const {
    if (getpid() != owner) return;
    if (PyGILState_Check() == 0) {
      delete object;
      return;
    }
    const pybind11::gil_scoped_release no_gil;
    delete object;
  }
};

template <class T>
using Threaded = std::unique_ptr<T, DeleteWhereMade<T>>;

// Shared, because a framework's thread may use an engine that Python releases.
using EnginePtr = std::shared_ptr<Engine>;
using EngineClass = pybind11::class_<Engine, EnginePtr>;

// Wraps an object so that any thread may release it; null for None.
inline std::shared_ptr<pybind11::object> hold(pybind11::object object) {
  if (object.is_none()) return nullptr;
  return {new pybind11::object(std::move(object)), [](pybind11::object* held) {
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace qsgd

void bind_start(qsgd::EngineClass& engine);
