#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>

#include "engine/operation.h"
#include "quant/codec.h"

void bind_engine(pybind11::module_& m);
void bind_operation(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
void bind_communicator(pybind11::module_& m);
void bind_spec(pybind11::module_& m);
void bind_threads(pybind11::module_& m);
void bind_bucket(pybind11::module_& m);

// Values by their names in Python; each function throws a usage error that lists the known names.
qsgd::DType parse_dtype(const std::string& name);
qsgd::Generator parse_generator(const std::string& name);
qsgd::ReduceOp parse_op(const std::string& name);
qsgd::OpKind parse_kind(const std::string& name);

// The code, or None for no compression.
using OptionalSpec = std::optional<qsgd::CodecSpec>;
