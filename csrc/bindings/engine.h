// What the bindings of the engine and of its operations share.
#pragma once

#include <memory>

#include "bindings/bindings.h"
#include "bindings/threaded.h"
#include "engine/engine.h"

namespace qsgd {

// Shared, since a framework's thread may be at work in an engine that Python lets go.
using EnginePtr = std::shared_ptr<Engine>;
using EngineClass = pybind11::class_<Engine, EnginePtr>;

// An object that any thread may let go; null for None.
inline std::shared_ptr<pybind11::object> hold(pybind11::object object) {
  if (object.is_none()) return nullptr;
  return {new pybind11::object(std::move(object)), [](pybind11::object* held) {
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace qsgd

void bind_start(qsgd::EngineClass& engine);
