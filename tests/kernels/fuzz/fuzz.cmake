# cmake -DMOEBIUS_SANITIZE=address (with undefined behaviour) or =thread, then --target moebius_fuzz: the kernels
# without Python under a sanitizer. Included after the per-file instruction sets are set, which it shares.
set(MOEBIUS_SANITIZE "" CACHE STRING "Sanitizer of the target moebius_fuzz: address, thread or none")
if(MOEBIUS_SANITIZE STREQUAL "")
  return()
endif()
set(SANITIZE_address -fsanitize=address,undefined -fno-sanitize-recover=all)
set(SANITIZE_thread -fsanitize=thread)
set(SANITIZE_none "")
if(NOT DEFINED SANITIZE_${MOEBIUS_SANITIZE})
  message(FATAL_ERROR "MOEBIUS_SANITIZE is '${MOEBIUS_SANITIZE}'; allowed: address, thread, none")
endif()

file(GLOB FUZZ_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/kernels/fuzz/*.cc)
set(FUZZED_SOURCES ${KERNEL_SOURCES} ${TESTING_SOURCES})
list(FILTER FUZZED_SOURCES EXCLUDE REGEX "/kernels/(mailbox/|testing/(module|bind_|mailbox_|echo_|probe))")
# Threads share what kernels/moe and kernels/pool give them, which the scalar GEMMs show. What a vector kernel touches
# beyond its own result and scratch would be a memory error: races are not looked for in them, and the thread sanitizer's
# program does without those that take most of the time to build.
if(MOEBIUS_SANITIZE STREQUAL "thread")
  list(FILTER FUZZED_SOURCES EXCLUDE REGEX "/gemm_(avx2|avx512|avx512_vnni|avx512_bf16|amx|amx_emulated)\\.cc$")
endif()
add_executable(moebius_fuzz EXCLUDE_FROM_ALL ${FUZZ_SOURCES} ${FUZZED_SOURCES})
target_include_directories(moebius_fuzz PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(moebius_fuzz PRIVATE Threads::Threads)
# -O1 is optimised enough for the vector types to stay in registers: many cases in little time, as `make fuzz` wants it. What
# tests take of it is a few seconds either way, and -O0 is built in a third of the processor time.
set(MOEBIUS_FUZZ_OPTIMISATION -O1 CACHE STRING "The compiler's level of optimisation of the target moebius_fuzz")
target_compile_options(moebius_fuzz PRIVATE ${MOEBIUS_FUZZ_OPTIMISATION} -g1 -march=x86-64-v2 -ffp-contract=off -fno-math-errno
                       -Wall -Wextra ${SANITIZE_${MOEBIUS_SANITIZE}})
# Vector loops are only checked for memory errors: checks of undefined behaviour double the time that they take to build, and
# the same loops over tiles and formats are in scalar files. Their accesses are checked by calls: written out, the
# checks would make them take three times as long to build.
#
# Sanitizers see no tile instruction; the loops around them are those of the emulated tiles.
foreach(source IN LISTS FUZZED_SOURCES)
  if(source MATCHES "_amx\\.cc$")
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=all)
  elseif(source MATCHES "_(avx2|avx512|avx512_vnni|avx512_bf16|amx_emulated)\\.cc$")
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=undefined,thread
                 --param=asan-instrumentation-with-call-threshold=0)
  endif()
  # Its own -O1 (CMakeLists.txt) would take half of the time that the whole program is built in; the cases take as long.
  if(source MATCHES "_amx_emulated\\.cc$")
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${MOEBIUS_FUZZ_OPTIMISATION})
  endif()
endforeach()
target_link_options(moebius_fuzz PRIVATE ${SANITIZE_${MOEBIUS_SANITIZE}})

# A folder's files are compiled as one, which reads their headers once. Files with options of their own stay alone, and so do
# those whose local names another file of their group has, too: a new one of these is an error of the compiler that names it.
set(ALONE "/(gemm_scalar|vector_scalar|requantise_scalar|kernel_plan|weight_format)\\.cc$")
set_target_properties(moebius_fuzz PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
foreach(source IN LISTS FUZZED_SOURCES FUZZ_SOURCES)
  get_filename_component(folder ${source} DIRECTORY)
  get_filename_component(folder ${folder} NAME)
  if(NOT folder MATCHES "^(format|fuzz|moe)$")
    set(folder others)
  endif()
  if(NOT source MATCHES "${ALONE}")
    set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${folder})
  endif()
endforeach()
