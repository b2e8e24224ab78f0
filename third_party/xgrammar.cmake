# xgrammar: masks of grammars. Offers the target openspec_xgrammar: its headers, as system headers, and its archive.
# OPENSPEC_XGRAMMAR_BUILT names the build folder of third_party/xgrammar, to link an archive that is there.
set(OPENSPEC_XGRAMMAR_BUILT "" CACHE PATH "Build folder of third_party/xgrammar whose archive is linked")

add_library(openspec_xgrammar INTERFACE)
if(OPENSPEC_XGRAMMAR_BUILT)
  if(NOT EXISTS ${OPENSPEC_XGRAMMAR_BUILT}/libxgrammar.a)
    message(FATAL_ERROR "OPENSPEC_XGRAMMAR_BUILT: ${OPENSPEC_XGRAMMAR_BUILT} holds no libxgrammar.a: build it first "
                        "(cmake -S third_party/xgrammar -B DIR && cmake --build DIR).")
  endif()
  file(READ ${OPENSPEC_XGRAMMAR_BUILT}/tree.txt xgrammar_tree)
  target_link_libraries(openspec_xgrammar INTERFACE ${OPENSPEC_XGRAMMAR_BUILT}/libxgrammar.a)
else()
  add_subdirectory(third_party/xgrammar)
  file(READ ${CMAKE_CURRENT_BINARY_DIR}/third_party/xgrammar/tree.txt xgrammar_tree)
  target_link_libraries(openspec_xgrammar INTERFACE xgrammar)
endif()
# By a link, so that all builds name its headers by one relative path, by which ccache finds their objects.
file(CREATE_LINK ${xgrammar_tree} ${CMAKE_BINARY_DIR}/xgrammar-headers SYMBOLIC)
set(xgrammar_tree ${CMAKE_BINARY_DIR}/xgrammar-headers)
# cpp: the declarations of its log, see csrc/grammar/library.cpp; added: what csrc/grammar defines for it.
target_include_directories(openspec_xgrammar SYSTEM INTERFACE
  ${xgrammar_tree}/include ${xgrammar_tree}/3rdparty/dlpack/include ${xgrammar_tree}/cpp
  ${CMAKE_CURRENT_LIST_DIR}/xgrammar/added)
target_compile_definitions(openspec_xgrammar INTERFACE XGRAMMAR_ENABLE_CPPTRACE=0 XGRAMMAR_LOG_CUSTOMIZE=1)
