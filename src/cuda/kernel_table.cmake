# SPDX-License-Identifier: Apache-2.0
# tessera_kernel_table(FOLDER ROWS function KERNEL type COLUMNS type CODE type [MAKE name FROM header]
#                      [TYPES header] [PER_FILE n | TOGETHER regex])
#
# Reads FOLDER/table.def, of lines and comments as C++ has them:
#
#   ROW(name, features, .column = value, ...)   // why
#
# a kernel for each element type: bf16 and fp16, or what a column `.elements = Elements::fp32` says. The columns are the
# members of the type COLUMNS, in its order. The kernel is what MAKE<element, Row_...>() of the header FROM makes;
# without MAKE, what a column `.loop = Loop::x` says: make_x() of FOLDER/x.cuh. TYPES declares KERNEL, COLUMNS and CODE;
# kernels.h of the room, where it does not say.
#
# Sets, of FOLDER with _ for /,
#   <FOLDER>_table    a file that defines std::span<const KERNEL> ROWS(): all rows, in the table's order. Every
#                     build compiles it; KERNEL::code is null in one without CUDA.
#   <FOLDER>_sources  the instances, for nvcc. PER_FILE: so many rows a file, those far apart in the table together:
#                     reading the headers costs as much as a kernel, and kernels of all features stand side by
#                     side. Otherwise a file has the rows whose names differ in the head dims alone, of one element
#                     type; of all types where the name matches TOGETHER, and where a column `.gpus` keeps them from
#                     some GPUs.
set(TESSERA_KERNEL_TABLE_DIR ${CMAKE_CURRENT_LIST_DIR})

function(tessera_kernel_table folder)
  cmake_parse_arguments(PARSE_ARGV 1 TABLE "" "ROWS;KERNEL;COLUMNS;CODE;MAKE;FROM;TYPES;PER_FILE;TOGETHER" "")
  set(file ${TESSERA_KERNEL_TABLE_DIR}/${folder}/table.def)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  string(REPLACE "/" "_" flat ${folder})
  string(REGEX REPLACE "/.*" "" ROOM ${folder})
  string(REGEX REPLACE "^[^/]*/" "" inner ${folder})
  string(REPLACE "/" "_" inner ${inner})
  set(TABLE src/cuda/${folder}/table.def)

  set(elements_two_bytes bf16 fp16)
  set(elements_fp32 fp32)
  set(element_bf16 __nv_bfloat16)
  set(element_fp16 __half)
  set(element_fp32 float)
  set(dtype_bf16 TESSERA_BF16)
  set(dtype_fp16 TESSERA_FP16)
  set(dtype_fp32 TESSERA_FP32)

  file(READ ${file} text)
  string(REGEX REPLACE "//[^\n]*" "" text "${text}")
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  string(REGEX MATCHALL "ROW\\([^()]*\\)" lines "${text}")
  string(REGEX REPLACE "ROW\\([^()]*\\)" "" rest "${text}")
  if(NOT rest MATCHES "^ *$" OR NOT lines)
    message(FATAL_ERROR "${TABLE}: not a row: ${rest}")
  endif()
  list(LENGTH lines count)
  set(number 0)
  set(groups)
  set(DECLARATIONS "")
  set(ROWS "")
  foreach(line IN LISTS lines)
    if(NOT line MATCHES "^ROW\\(([a-z0-9_]+), ([^,]+), ([^()]*)\\)$")
      message(FATAL_ERROR "${TABLE}: must be ROW(name, features, .column = value, ...): ${line}")
    endif()
    set(name ${CMAKE_MATCH_1})
    set(features ${CMAKE_MATCH_2})
    set(columns ${CMAKE_MATCH_3})
    set(elements two_bytes)
    if(columns MATCHES "\\.elements = Elements::([a-z0-9_]+)")
      set(elements ${CMAKE_MATCH_1})
    endif()
    if(TABLE_MAKE)
      set(make ${TABLE_MAKE})
      set(header ${TABLE_FROM})
    elseif(columns MATCHES "\\.loop = Loop::([a-z_]+)")
      set(make make_${CMAKE_MATCH_1})
      set(header cuda/${folder}/${CMAKE_MATCH_1}.cuh)
    else()
      message(FATAL_ERROR "${TABLE}: ${name} has no column .loop")
    endif()
    set(gpus)
    if(columns MATCHES "\\.gpus = Gpus::([a-z]+)")
      set(gpus _${CMAKE_MATCH_1})
    endif()
    # What the rows of a file have in common.
    string(REGEX REPLACE "_(d[0-9]+(_[0-9]+)?|small(er)?|fp32)" "" kind "_${name}")
    string(REGEX REPLACE "^_" "" kind "${kind}")
    foreach(type IN LISTS elements_${elements})
      if(TABLE_PER_FILE)
        math(EXPR group "${number} % ((${count} + ${TABLE_PER_FILE} - 1) / ${TABLE_PER_FILE})")
        set(group rows_${group})
      elseif(gpus OR (TABLE_TOGETHER AND kind MATCHES "${TABLE_TOGETHER}"))
        set(group ${kind}${gpus})
      else()
        set(group ${kind}_${type})
      endif()
      list(APPEND groups ${group})
      list(APPEND includes_${group} "#include \"${header}\"\n")
      set(row Row_${inner}_${name})
      set(code code_${inner}_${name}_${type})
      if(NOT "${row}" IN_LIST rows_of_${group})
        list(APPEND rows_of_${group} ${row})
        string(APPEND definitions_${group} "namespace {\nstruct ${row} {\n"
               "  static constexpr ${TABLE_COLUMNS} kTile{${columns}};\n"
               "  static constexpr uint32_t kFeatures = ${features};\n};\n}  // namespace\n")
      endif()
      string(APPEND definitions_${group} "extern const ${TABLE_CODE} ${code};\n"
             "const ${TABLE_CODE} ${code} = ${make}<${element_${type}}, ${row}>();\n")
      if(TESSERA_CUDA)
        string(APPEND DECLARATIONS "extern const ${TABLE_CODE} ${code};\n")
        set(address "&${code}")
      else()
        set(address nullptr)
      endif()
      string(APPEND ROWS "      {\"${folder}/${name}\", ${dtype_${type}}, ${features}, {${columns}}, ${address}},\n")
    endforeach()
    math(EXPR number "${number} + 1")
  endforeach()

  if(NOT TABLE_TYPES)
    set(TABLE_TYPES cuda/${ROOM}/kernels.h)
  endif()
  set(INCLUDES "#include \"${TABLE_TYPES}\"")
  set(KERNEL ${TABLE_KERNEL})
  set(FUNCTION ${TABLE_ROWS})
  set(out ${CMAKE_CURRENT_BINARY_DIR}/${folder})
  configure_file(${TESSERA_KERNEL_TABLE_DIR}/kernel_table.cc.in ${out}/table.cc @ONLY)
  set(${flat}_table ${out}/table.cc PARENT_SCOPE)
  set(sources)
  if(TESSERA_CUDA)
    list(REMOVE_DUPLICATES groups)
    foreach(group IN LISTS groups)
      list(REMOVE_DUPLICATES includes_${group})
      list(JOIN includes_${group} "" INCLUDES)
      set(DEFINITIONS "${definitions_${group}}")
      configure_file(${TESSERA_KERNEL_TABLE_DIR}/kernel_instances.cu.in ${out}/${group}.cu @ONLY)
      list(APPEND sources ${out}/${group}.cu)
    endforeach()
  endif()
  set(${flat}_sources ${sources} PARENT_SCOPE)
endfunction()
