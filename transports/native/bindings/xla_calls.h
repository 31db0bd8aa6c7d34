//! Calls that programs of XLA make without Python: a table of registered calls, and the handler that runs them.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

void bind_xla_calls(nanobind::module_& module);

}  // namespace unisono
