// Errors of the core and of Python for other extension modules.
#include <new>

#include "api/implementation.h"

namespace cudafuture::api {
namespace {

using Kind = Problem::Kind;

Kind kind_of(io::FailureKind kind) {
  switch (kind) {
    case io::FailureKind::storage:
      return Kind::storage;
    case io::FailureKind::checksum:
      return Kind::checksum;
    case io::FailureKind::quota:
      return Kind::quota;
    case io::FailureKind::not_found:
      return Kind::not_found;
  }
  return Kind::other;
}

std::exception_ptr failure_of(const Problem& problem, io::FailureKind kind) {
  return std::make_exception_ptr(
      io::Failure(problem.message, problem.code, problem.path, problem.offset, problem.wanted, problem.got, kind));
}

bind::nb::object exception_of(const Problem& problem) {
  switch (problem.kind) {
    case Kind::storage:
      return bind::exception_of(failure_of(problem, io::FailureKind::storage));
    case Kind::checksum:
      return bind::exception_of(failure_of(problem, io::FailureKind::checksum));
    case Kind::quota:
      return bind::exception_of(failure_of(problem, io::FailureKind::quota));
    case Kind::not_found:
      return bind::exception_of(failure_of(problem, io::FailureKind::not_found));
    case Kind::invalid_state:
      return bind::make_error("InvalidStateError", problem.message);
    case Kind::timeout:
      return bind::make_error(PyExc_TimeoutError, problem.message);
    case Kind::blocking:
      return bind::make_error(PyExc_BlockingIOError, problem.message);
    case Kind::value:
      return bind::make_error(PyExc_ValueError, problem.message);
    case Kind::memory:
      return bind::make_error(PyExc_MemoryError, problem.message);
    case Kind::authentication:
      return bind::make_error("AuthenticationError", problem.message);
    case Kind::other:
      break;
  }
  return bind::make_error(PyExc_RuntimeError, problem.message);
}

}  // namespace

Problem problem_of(const std::exception_ptr& error) {
  Problem problem;
  try {
    std::rethrow_exception(error);
  } catch (const Failure& e) {
    problem = e.problem();
  } catch (const io::Failure& e) {
    problem = {kind_of(e.kind()), e.what(), e.path(), e.code(), e.offset(), e.wanted(), e.got()};
  } catch (const Error& e) {
    problem.kind = e.kind() == ErrorKind::invalid_state ? Kind::invalid_state : Kind::other;
    problem.message = e.what();
  } catch (const std::bad_alloc&) {
    problem.kind = Kind::memory;
    problem.message = "the service has no memory for this operation";
  } catch (const std::exception& e) {
    problem.message = e.what();
  }
  return problem;
}

void set_error(const Problem& problem) {
  const bind::ParkingScope parking;
  try {
    const bind::nb::object error = exception_of(problem);
    PyErr_SetObject(error.type().ptr(), error.ptr());
  } catch (bind::nb::python_error& e) {  // for example, there is no memory
    e.restore();
  }
}

}  // namespace cudafuture::api
