// Common declarations of the bindings of the engine and of operations.
#pragma once

#include <memory>

#include "bindings/bindings.h"
#include "bindings/threaded.h"
#include "engine/engine.h"

namespace qsgd {

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
