// What the bindings of the engine, its operations and their handles share.
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
std::shared_ptr<pybind11::object> hold(pybind11::object object);

}  // namespace qsgd

void bind_handle(pybind11::module_& m);
void bind_start(qsgd::EngineClass& engine);
