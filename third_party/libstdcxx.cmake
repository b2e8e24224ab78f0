# Some toolchains link the C++ library statically. In a Python process, which has the shared one already, that makes
# two, with two sets of locale ids: printing a number into a stream crashes. So openspec_libstdcxx is the shared one, by
# name; extension modules link it.

add_library(openspec_libstdcxx INTERFACE)
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6
                OUTPUT_VARIABLE libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(IS_ABSOLUTE "${libstdcxx}")
  target_link_libraries(openspec_libstdcxx INTERFACE ${libstdcxx})
endif()
