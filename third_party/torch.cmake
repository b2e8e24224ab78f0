# PyTorch: headers and libraries of the environment that openspec is being installed into.
#
# pip builds in an environment of its own that hides the target's packages through PYTHONPATH;
# `python -E` ignores that variable, and the one that hides the user's, and sees them. A build requirement on torch would download a
# second, possibly different torch of several GB instead.
#
# Sets OPENSPEC_TORCH_LIB_DIR, OPENSPEC_TORCH_VERSION, OPENSPEC_TORCH_CUDA (version, or empty) and the
# target openspec_torch.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
set(OPENSPEC_TORCH_PYTHON "${Python_EXECUTABLE}" CACHE FILEPATH
    "Interpreter of the environment whose torch is built against")

set(query [=[
import os, torch
root = os.path.dirname(torch.__file__)
print(root, torch.__version__, torch.version.cuda or "", int(torch.compiled_with_cxx11_abi()), sep="\n")
]=])
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH "${OPENSPEC_TORCH_PYTHON}" -E -c "${query}"
  OUTPUT_VARIABLE torch_facts ERROR_VARIABLE torch_error RESULT_VARIABLE torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_result EQUAL 0)
  string(REGEX REPLACE ".*\n([^\n]+)\n?$" "\\1" torch_error "${torch_error}")
  # Indented text is not wrapped: one line.
  message(FATAL_ERROR "  openspec needs PyTorch, and ${OPENSPEC_TORCH_PYTHON} cannot import it (${torch_error}): \
run `pip install torch` first, then this command again; if your installer builds with another interpreter (uv, \
python -m build), add --no-build-isolation or CMAKE_ARGS=-DOPENSPEC_TORCH_PYTHON=/path/to/env/bin/python.\n")
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 torch_root)
list(GET torch_facts 1 OPENSPEC_TORCH_VERSION)
list(GET torch_facts 2 OPENSPEC_TORCH_CUDA)
list(GET torch_facts 3 torch_cxx11_abi)
if(OPENSPEC_TORCH_VERSION VERSION_LESS 2.6)
  message(FATAL_ERROR "openspec needs torch 2.6 or newer, found ${OPENSPEC_TORCH_VERSION}: "
                      "run `pip install --upgrade torch`.")
endif()
set(OPENSPEC_TORCH_LIB_DIR ${torch_root}/lib)

add_library(openspec_torch INTERFACE)
# Not torch/csrc/api/include: nothing may include torch/extension.h or the C++ frontend.
target_include_directories(openspec_torch SYSTEM INTERFACE ${torch_root}/include)
target_compile_definitions(openspec_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
set(torch_libs c10 torch_cpu torch torch_python)
if(OPENSPEC_TORCH_CUDA)
  list(APPEND torch_libs c10_cuda torch_cuda)
endif()
foreach(lib IN LISTS torch_libs)
  find_library(lib_path ${lib} PATHS ${OPENSPEC_TORCH_LIB_DIR} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(openspec_torch INTERFACE ${lib_path})
  unset(lib_path)
endforeach()
target_link_libraries(openspec_torch INTERFACE openspec_libstdcxx)
message(STATUS "torch ${OPENSPEC_TORCH_VERSION} of ${OPENSPEC_TORCH_PYTHON}")
