// The parts that the sources of this folder share. Other modules do not include this header.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "api/error.h"
#include "api/promise.h"
#include "bind/errors.h"
#include "core/error.h"
#include "core/future.h"
#include "io/aligned.h"
#include "io/failure.h"

namespace cudafuture::api {

inline Failure value_failure(std::string message) { return Failure({Problem::Kind::value, std::move(message)}); }

// Calls a function without the GIL. Errors of the core and exhausted memory become failures; others,
// such as a device's, pass.
template <class Function>
auto call_core(Function&& function) {
  try {
    return function();
  } catch (const Error&) {
    throw Failure(problem_of(std::current_exception()));
  } catch (const io::Failure&) {
    throw Failure(problem_of(std::current_exception()));
  } catch (const std::bad_alloc&) {
    throw Failure(problem_of(std::current_exception()));
  }
}

// Calls a function with the GIL. Its exception becomes an exception of Python in this thread.
template <class Function>
auto call_with_gil(Function&& function) {
  const bind::ParkingScope parking;
  try {
    return function();
  } catch (...) {
    const bind::nb::object error = bind::exception_of(std::current_exception());
    PyErr_SetObject(error.type().ptr(), error.ptr());
  }
  throw PythonError();
}

inline io::Shape shape_from(c10::ScalarType dtype, const std::vector<std::int64_t>& sizes) {
  return {dtype, {sizes.begin(), sizes.end()}};
}

class NativePromise final : public Promise {
 public:
  NativePromise(std::string name, int priority, bool has_released, const OperationFacts& facts);
  ~NativePromise() override;
  NativePromise(const NativePromise&) = delete;
  NativePromise& operator=(const NativePromise&) = delete;

  _object* future() override;
  void complete(c10::IValue value) noexcept override;
  void fail(_object* exception) noexcept override;
  void release() noexcept override { core_->release(); }

  // ---- for reads
  void complete(Value&& value, EventSet&& events) noexcept { core_->complete(std::move(value), std::move(events)); }
  void fail(_object* exception, EventSet&& events) noexcept;  // takes over a reference
  void fail(Value&& error, EventSet&& events) noexcept { core_->fail(std::move(error), std::move(events)); }

 private:
  const FuturePtr core_;
};

}  // namespace cudafuture::api
