# SPDX-License-Identifier: Apache-2.0
# The whole library with the host code of the CUDA backends, compiled against headers of a GPU that is only imagined
# (imagined/), so that the planners run under sanitizers in every build without CUDA.
if(NOT GTest_FOUND)
  return()
endif()
set(cuda ${PROJECT_SOURCE_DIR}/src/cuda)
file(GLOB planners CONFIGURE_DEPENDS ${cuda}/sm80/backend.cc ${cuda}/sm80/*/host.cc ${cuda}/sm90/backend.cc
     ${cuda}/sm90/*/host.cc ${cuda}/sm90/backward/apart/host.cc ${cuda}/sm90/backward/schedule/order.cc
     ${cuda}/sm90/machine/tensormap.cc)
list(APPEND planners ${cuda}/common/launch.cc ${cuda}/common/score/block_layout.cc)

# The rules, with tables whose rows have code.
get_target_property(rules tessera_cuda_rules SOURCES)
set(tables ${rules})
list(FILTER rules EXCLUDE REGEX "/table\\.cc$")
list(TRANSFORM rules PREPEND ${cuda}/)
list(FILTER tables INCLUDE REGEX "/table\\.cc$")
set(with_code)
foreach(table IN LISTS tables)
  file(READ ${table} text)
  string(REPLACE ", nullptr}" ", ImaginedCode{}}" text "${text}")
  string(REGEX REPLACE ".*/src/cuda/" "" name ${table})
  set(out ${CMAKE_CURRENT_BINARY_DIR}/imagined/${name})
  file(CONFIGURE OUTPUT ${out} CONTENT "#include \"cuda/imagined/code.h\"\n${text}" @ONLY)
  list(APPEND with_code ${out})
endforeach()

set(others ${rooms})
list(REMOVE_ITEM others tessera_door tessera_cuda_rules tessera_conformance)
set(door c_api.cc backends.cc reference.cc)
list(TRANSFORM door PREPEND ${PROJECT_SOURCE_DIR}/src/)
tessera_test(cuda_sizes_test ROOMS ${others} LABELS core sanitize
             SOURCES sizes_test.cc imagined/runtime.cc ${planners} ${rules} ${with_code} ${door})
target_include_directories(cuda_sizes_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/imagined)
target_compile_definitions(cuda_sizes_test PRIVATE TESSERA_VERSION="${PROJECT_VERSION}" TESSERA_WITH_CUDA=1)
target_link_libraries(cuda_sizes_test PRIVATE ${CMAKE_DL_LIBS})
set_target_properties(cuda_sizes_test PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)
