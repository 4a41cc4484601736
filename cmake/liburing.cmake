# liburing, for io_uring: CUDAFUTURE_HAS_LIBURING and the target cudafuture_liburing.
#
# It is optional: without it files are read and written by threads. The static library is taken where there is one, so
# that what is built here runs on machines without it.

set(CUDAFUTURE_HAS_LIBURING OFF)
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(LIBURING QUIET IMPORTED_TARGET liburing>=2.3)
endif()
if(LIBURING_FOUND)
  set(CUDAFUTURE_HAS_LIBURING ON)
  add_library(cudafuture_liburing INTERFACE)
  find_library(LIBURING_STATIC liburing.a HINTS ${LIBURING_LIBRARY_DIRS})
  if(LIBURING_STATIC)
    target_include_directories(cudafuture_liburing SYSTEM INTERFACE ${LIBURING_INCLUDE_DIRS})
    target_link_libraries(cudafuture_liburing INTERFACE "${LIBURING_STATIC}")
  else()
    target_link_libraries(cudafuture_liburing INTERFACE PkgConfig::LIBURING)
  endif()
  message(STATUS "liburing ${LIBURING_VERSION}")
else()
  message(STATUS "no liburing: files are read and written without io_uring")
endif()
