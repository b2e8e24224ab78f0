#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, m) { m.attr("torch_version") = OPENSPEC_TORCH_VERSION; }
