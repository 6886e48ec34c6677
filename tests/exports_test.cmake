# SPDX-License-Identifier: Apache-2.0
# cmake -D NM=nm -D LIBRARIES="libtessera.so;libtessera_check.so;libtessera_nvte.so" -P exports_test.cmake
# libtessera exports the functions of tessera.h, libtessera_check those of the conformance suite,
# libtessera_nvte those of tessera_nvte.h, and none any other symbol.
foreach(library IN LISTS LIBRARIES)
  execute_process(COMMAND ${NM} --dynamic --defined-only ${library} OUTPUT_VARIABLE lines
                  COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" lines "${lines}")
  set(count 0)
  foreach(line IN LISTS lines)
    string(REGEX REPLACE ".* " "" symbol "${line}")
    set(of tessera)
    if(symbol MATCHES "^tessera_(case|probe|reference)_")
      set(of tessera_check)
    elseif(symbol MATCHES "^tessera_nvte_")
      set(of tessera_nvte)
    endif()
    if(NOT symbol MATCHES "^tessera_" OR NOT library MATCHES "lib${of}\\.[^/]*$")
      message(SEND_ERROR "${library} exports ${symbol}")
    endif()
    math(EXPR count "${count} + 1")
  endforeach()
  if(count LESS 5)
    message(SEND_ERROR "${library} exports ${count} symbols")
  endif()
  message(STATUS "${library}: ${count} symbols")
endforeach()
