# torch::cpu and torch::python: the libraries of the torch that is installed in ${Python_EXECUTABLE}.
#
# find_package(Torch) is not used: it asks for a CUDA toolkit when torch is a CUDA build, and nothing here needs one.
# Sets TORCH_DIR (torch's folder) and TORCH_VERSION.

set(ask_torch "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__, \
int(torch._C._GLIBCXX_USE_CXX11_ABI), sep=';')")
execute_process(COMMAND "${Python_EXECUTABLE}" -c "${ask_torch}" OUTPUT_VARIABLE torch_answer
                RESULT_VARIABLE torch_failed ERROR_VARIABLE torch_error OUTPUT_STRIP_TRAILING_WHITESPACE)
if(torch_failed)
  message(FATAL_ERROR "cudafuture is built against the torch that is installed, and ${Python_EXECUTABLE} has none. "
                      "Install torch there first, then build with: pip install --no-build-isolation .\n${torch_error}")
endif()
list(GET torch_answer 0 TORCH_DIR)
list(GET torch_answer 1 TORCH_VERSION)
list(GET torch_answer 2 torch_cxx11_abi)
if(TORCH_VERSION VERSION_LESS 2.11 OR TORCH_VERSION VERSION_GREATER_EQUAL 2.16)
  message(WARNING "cudafuture is tested with torch 2.11 to 2.15; this is ${TORCH_VERSION}")
endif()
message(STATUS "torch ${TORCH_VERSION} in ${TORCH_DIR}")

foreach(lib IN ITEMS c10 torch_cpu torch_python)
  add_library(torch_lib_${lib} SHARED IMPORTED)
  set_target_properties(torch_lib_${lib} PROPERTIES IMPORTED_LOCATION
                        "${TORCH_DIR}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}${lib}${CMAKE_SHARED_LIBRARY_SUFFIX}")
endforeach()

add_library(torch_cpu_interface INTERFACE)
add_library(torch::cpu ALIAS torch_cpu_interface)
target_include_directories(torch_cpu_interface SYSTEM INTERFACE "${TORCH_DIR}/include"
                           "${TORCH_DIR}/include/torch/csrc/api/include")
target_compile_definitions(torch_cpu_interface INTERFACE _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
target_link_libraries(torch_cpu_interface INTERFACE torch_lib_torch_cpu torch_lib_c10)

add_library(torch_python_interface INTERFACE)
add_library(torch::python ALIAS torch_python_interface)
target_link_libraries(torch_python_interface INTERFACE torch_lib_torch_python torch::cpu)
