# Where the source is: OPENSPEC_XGRAMMAR_TREE. OPENSPEC_XGRAMMAR_SOURCE (CMake or environment) names the sdist or an
# unpacked one, for machines without a network; else pip downloads it into the build folder. Both are checked by hash.
set(version 0.2.8)
set(sha256 8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80)
set(name xgrammar-${version})
set(place ${CMAKE_CURRENT_BINARY_DIR}/xgrammar-source)
set(OPENSPEC_XGRAMMAR_SOURCE "$ENV{OPENSPEC_XGRAMMAR_SOURCE}" CACHE PATH
    "The sdist ${name}.tar.gz, or the folder it was unpacked into")

set(remedy "download ${name}.tar.gz where there is a network (python -m pip download --no-deps --no-binary xgrammar \
xgrammar==${version}), and name it: OPENSPEC_XGRAMMAR_SOURCE=/path/to/${name}.tar.gz in the environment, or \
-DOPENSPEC_XGRAMMAR_SOURCE.")

if(OPENSPEC_XGRAMMAR_SOURCE AND IS_DIRECTORY "${OPENSPEC_XGRAMMAR_SOURCE}")
  set(OPENSPEC_XGRAMMAR_TREE ${OPENSPEC_XGRAMMAR_SOURCE})
else()
  set(OPENSPEC_XGRAMMAR_TREE ${place}/${name})
  set(archive ${place}/${name}.tar.gz)
  if(OPENSPEC_XGRAMMAR_SOURCE)
    set(archive ${OPENSPEC_XGRAMMAR_SOURCE})
  elseif(NOT EXISTS ${archive})
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    # The hash is checked before anything of the archive runs: its metadata is made, nothing is compiled.
    file(WRITE ${place}/requirements.txt "xgrammar==${version} --hash=sha256:${sha256}\n")
    message(STATUS "Downloading ${name}.tar.gz with pip")
    execute_process(
      COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH "${Python_EXECUTABLE}" -m pip download --quiet
              --disable-pip-version-check --no-deps --no-binary xgrammar --dest ${place} -r ${place}/requirements.txt
      OUTPUT_VARIABLE pip_output ERROR_VARIABLE pip_output RESULT_VARIABLE pip_result)
    if(NOT pip_result EQUAL 0)
      string(STRIP "${pip_output}" pip_output)
      string(REGEX REPLACE "\n" "\n  " pip_output "${pip_output}")
      message(FATAL_ERROR "  pip could not download xgrammar ${version}:\n  ${pip_output}\n  Without a network ${remedy}\n")
    endif()
  endif()
  if(NOT EXISTS ${archive})
    message(FATAL_ERROR "  ${archive} does not exist: ${remedy}\n")
  endif()
  file(SHA256 ${archive} found_sha256)
  if(NOT found_sha256 STREQUAL sha256)
    message(FATAL_ERROR "  ${archive} is not the archive of xgrammar ${version} (its SHA-256 is ${found_sha256}): ${remedy}\n")
  endif()
  if(NOT EXISTS ${OPENSPEC_XGRAMMAR_TREE}/include/xgrammar/xgrammar.h)
    file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${place}
         PATTERNS ${name}/cpp/* ${name}/include/* ${name}/3rdparty/dlpack/* ${name}/3rdparty/picojson/* ${name}/LICENSE)
  endif()
endif()
if(NOT EXISTS ${OPENSPEC_XGRAMMAR_TREE}/include/xgrammar/xgrammar.h
   OR NOT EXISTS ${OPENSPEC_XGRAMMAR_TREE}/3rdparty/picojson/picojson.h)
  message(FATAL_ERROR "  ${OPENSPEC_XGRAMMAR_TREE} holds no source of xgrammar: ${remedy}\n")
endif()
