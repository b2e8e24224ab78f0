# CUDA: nvcc and the runtime library, as CMake finds them (CUDACXX, CUDA_HOME or PATH).
#
# Sets OPENSPEC_HAS_CUDA; with ON it enables the language, defines OPENSPEC_CUDA for all C++ and offers
# openspec_add_cuda_sources(target folder).

set(OPENSPEC_HAS_CUDA OFF)
if(OPENSPEC_CUDA STREQUAL "OFF")
  return()
endif()

# Says no: an error if CUDA was asked for, a status line if it was only looked for.
macro(openspec_no_cuda reason)
  if(OPENSPEC_CUDA STREQUAL "AUTO")
    message(STATUS "Building without CUDA: ${reason}")
    return()
  endif()
  message(FATAL_ERROR "OPENSPEC_CUDA=ON, but ${reason}")
endmacro()

if(OPENSPEC_PYTHON AND NOT OPENSPEC_TORCH_CUDA)
  openspec_no_cuda("torch ${OPENSPEC_TORCH_VERSION} is a CPU build: install a CUDA build of torch first")
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND DEFINED ENV{CUDA_HOME}
   AND EXISTS "$ENV{CUDA_HOME}/bin/nvcc")
  set(CMAKE_CUDA_COMPILER "$ENV{CUDA_HOME}/bin/nvcc")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${OPENSPEC_CUDA_ARCHS})
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  openspec_no_cuda("no nvcc was found: put it on PATH or set CUDA_HOME")
endif()
set(CMAKE_CUDA_STANDARD 17)  # CMake 3.25 knows no C++20 for nvcc
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # one runtime per process: torch's, if torch is loaded
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  openspec_no_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.8")
endif()
if(OPENSPEC_TORCH_CUDA)
  string(REGEX MATCH "^[0-9]+" torch_cuda_major "${OPENSPEC_TORCH_CUDA}")
  string(REGEX MATCH "^[0-9]+" nvcc_major "${CMAKE_CUDA_COMPILER_VERSION}")
  if(NOT torch_cuda_major STREQUAL nvcc_major)
    openspec_no_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} and torch's CUDA ${OPENSPEC_TORCH_CUDA} differ in their major version")
  endif()
endif()
find_package(CUDAToolkit REQUIRED)

set(OPENSPEC_HAS_CUDA ON)
add_compile_definitions($<$<COMPILE_LANGUAGE:CXX,CUDA>:OPENSPEC_CUDA=1>)

function(openspec_add_cuda_sources target folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${folder}/*.cu)
  if(NOT sources)
    return()
  endif()
  target_sources(${target} PRIVATE ${sources})
  target_link_libraries(${target} PUBLIC CUDA::cudart)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${OPENSPEC_WERROR}>>:-Werror=all-warnings -Xcompiler=-Werror>)
endfunction()
