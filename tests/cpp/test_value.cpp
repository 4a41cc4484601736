// What a future holds, and who owns the references in it.
#include <stdexcept>
#include <utility>

#include "core/value.h"
#include "fake_runtime.h"
#include "rules.h"

using namespace cudafuture;
using namespace cudafuture::fake;

TEST_SUITE_BEGIN("value");

TEST_CASE_FIXTURE(Rules, "each form holds what it was made of and nothing else") {
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

TEST_CASE_FIXTURE(Rules, "a moved value takes everything along") {
  Inside inside;
  int died = 0;
  const auto dies = [&] { ++died; };
  {
    Value one = Value::of_error(object(dies), object(dies));
    Value two = std::move(one);
    CHECK_FALSE(one.object);
    CHECK_FALSE(one.traceback);
    Value three;
    three = std::move(two);
    CHECK(died == 0);
  }
  CHECK(died == 2);
}

TEST_CASE_FIXTURE(Rules, "a reference is dropped once, by its last owner") {
  Inside inside;
  int died = 0;
  {
    Foreign one = object([&] { ++died; });
    Foreign two = share(one);
    one = Foreign();
    CHECK(died == 0);
    Foreign three = std::move(two);
    CHECK_FALSE(two);
  }
  CHECK(died == 1);
}

TEST_CASE_FIXTURE(Rules, "assigning drops what was held, after the new reference is in place") {
  Inside inside;
  Foreign holder;
  void* seen = nullptr;
  holder = object([&] { seen = holder.get(); });
  Foreign next = object();
  void* const raw = next.get();
  holder = std::move(next);
  CHECK(seen == raw);
}

TEST_CASE_FIXTURE(Rules, "a reference assigned to itself stays") {
  Inside inside;
  int died = 0;
  {
    Foreign one = object([&] { ++died; });
    Foreign& same = one;
    one = std::move(same);
    CHECK(static_cast<bool>(one));
    CHECK(died == 0);
  }
  CHECK(died == 1);
}

TEST_CASE_FIXTURE(Rules, "a reference that is taken is the taker's to drop") {
  Inside inside;
  Foreign one = object();
  void* const raw = one.take();
  CHECK_FALSE(one);
  CHECK(Object::alive == 1);
  const Foreign back(raw);
}

TEST_CASE_FIXTURE(Rules, "a visitor is shown objects, and never null") {
  int shown = 0;
  const ForeignVisitor visitor{[](void*, void* count) { return ++*static_cast<int*>(count); }, &shown};
  CHECK(visitor(nullptr) == 0);
  int thing = 0;
  CHECK(visitor(&thing) == 1);
  CHECK(shown == 1);
}

TEST_SUITE_END();
