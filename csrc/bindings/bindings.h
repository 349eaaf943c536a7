#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "collectives/reduce.h"
#include "quant/quantizer.h"

void bind_engine(pybind11::module_& m);
void bind_codec(pybind11::module_& m);

// Names as Python spells them; each throws a usage error that lists what is known.
qsgd::DType parse_dtype(const std::string& name);
qsgd::ReduceOp parse_op(const std::string& name);
qsgd::Norm parse_norm(const std::string& name);

// (bits, bucket_size, norm), or None for no compression.
using Coding = std::optional<std::tuple<int, uint32_t, std::string>>;
qsgd::QuantSpec parse_spec(const Coding& coding);
