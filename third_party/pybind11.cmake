# pybind11: a build requirement in pyproject.toml; found in the environment that builds.
if(NOT EXISTS "${pybind11_DIR}/pybind11Config.cmake")  # also: a build environment that is gone
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
                  OUTPUT_VARIABLE pybind11_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(pybind11_dir)
    set(pybind11_DIR "${pybind11_dir}" CACHE PATH "pybind11's CMake files" FORCE)
  endif()
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 2.13 CONFIG REQUIRED)
# By a link in the build folder: pip's build environment has another path each time, and ccache compares paths.
get_target_property(pybind11_headers pybind11::pybind11_headers INTERFACE_INCLUDE_DIRECTORIES)
file(CREATE_LINK ${pybind11_headers} ${CMAKE_BINARY_DIR}/pybind11-headers SYMBOLIC)
set_target_properties(pybind11::pybind11_headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${CMAKE_BINARY_DIR}/pybind11-headers)
