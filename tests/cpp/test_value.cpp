// The value of a future, and the ownership of the references in it.
#include <stdexcept>
#include <utility>

#include "core/value.h"
#include "fake_runtime.h"
#include "rules.h"

using namespace cudafuture;
using namespace cudafuture::fake;

TEST_SUITE_BEGIN("value");

TEST_CASE_FIXTURE(Rules, "a value of each form holds only what it was created from") {
  Inside inside;
  const Value nothing;
  CHECK(nothing.form == Value::Form::object);
  CHECK_FALSE(nothing.object);
  CHECK(nothing.native.isNone());

  const Value native = Value::of_native(3);
  CHECK(native.form == Value::Form::native);
  CHECK(native.native.toInt() == 3);
  CHECK_FALSE(native.object);

  const Value parts = Value::of_parts(object());
  CHECK(parts.form == Value::Form::parts);
  CHECK(static_cast<bool>(parts.object));

  const Value error = Value::of_error(std::make_exception_ptr(std::runtime_error("no")));
  CHECK(error.form == Value::Form::native);
  CHECK_THROWS_AS(std::rethrow_exception(error.error), std::runtime_error);

  const Value exception = Value::of_error(object(), object());
  CHECK(exception.form == Value::Form::object);
  CHECK(static_cast<bool>(exception.object));
  CHECK(static_cast<bool>(exception.traceback));
  CHECK(exception.error == nullptr);
}

TEST_CASE_FIXTURE(Rules, "a moved value transfers all its references") {
  Inside inside;
  int destroyed = 0;
  const auto count = [&] { ++destroyed; };
  {
    Value one = Value::of_error(object(count), object(count));
    Value two = std::move(one);
    CHECK_FALSE(one.object);
    CHECK_FALSE(one.traceback);
    Value three;
    three = std::move(two);
    CHECK(destroyed == 0);
  }
  CHECK(destroyed == 2);
}

TEST_CASE_FIXTURE(Rules, "a reference is dropped once, by its last owner") {
  Inside inside;
  int destroyed = 0;
  {
    Foreign one = object([&] { ++destroyed; });
    Foreign two = share(one);
    one = Foreign();
    CHECK(destroyed == 0);
    Foreign three = std::move(two);
    CHECK_FALSE(two);
  }
  CHECK(destroyed == 1);
}

TEST_CASE_FIXTURE(Rules, "an assignment drops the old reference after it stores the new one") {
  Inside inside;
  Foreign holder;
  void* seen = nullptr;
  holder = object([&] { seen = holder.get(); });
  Foreign next = object();
  void* const raw = next.get();
  holder = std::move(next);
  CHECK(seen == raw);
}

TEST_CASE_FIXTURE(Rules, "a reference that is assigned to itself is kept") {
  Inside inside;
  int destroyed = 0;
  {
    Foreign one = object([&] { ++destroyed; });
    Foreign& same = one;
    one = std::move(same);
    CHECK(static_cast<bool>(one));
    CHECK(destroyed == 0);
  }
  CHECK(destroyed == 1);
}

TEST_CASE_FIXTURE(Rules, "take() passes ownership of the reference to the caller") {
  Inside inside;
  Foreign one = object();
  void* const raw = one.take();
  CHECK_FALSE(one);
  CHECK(Object::alive == 1);
  const Foreign back(raw);
}

TEST_CASE_FIXTURE(Rules, "a visitor receives objects, but not null") {
  int visited = 0;
  const ForeignVisitor visitor{[](void*, void* count) { return ++*static_cast<int*>(count); }, &visited};
  CHECK(visitor(nullptr) == 0);
  int value = 0;
  CHECK(visitor(&value) == 1);
  CHECK(visited == 1);
}

TEST_SUITE_END();
