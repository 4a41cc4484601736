// The caller's context: the modes of torch that a callback inherits, and their restoration afterwards.
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <thread>

#include "core/context.h"
#include "rules.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

constexpr auto kCpu = c10::DeviceType::CPU;

struct Modes {
  bool grad = c10::GradMode::is_enabled();
  bool fw_grad = c10::AutogradState::get_tls_state().get_fw_grad_mode();
  bool inference = c10::InferenceMode::is_enabled();
  bool autocast = at::autocast::is_autocast_enabled(kCpu);
  at::ScalarType dtype = at::autocast::get_autocast_dtype(kCpu);
  bool cache = at::autocast::is_autocast_cache_enabled();

  bool operator==(const Modes&) const = default;
};

// Run `body` in a new thread, which has torch's default modes.
template <class Body>
void in_new_thread(Body body) {
  std::thread(body).join();
}

}  // namespace

TEST_SUITE_BEGIN("context");

TEST_CASE_FIXTURE(Rules, "a context carries grad mode, forward grad mode and inference mode") {
  for (const bool inference : {false, true}) {
    for (const bool grad : {false, true}) {
      for (const bool fw_grad : {false, true}) {
        CallerContext context;
        Modes there;
        in_new_thread([&] {
          c10::InferenceMode mode(inference);
          c10::AutogradState::get_tls_state().set_grad_mode(grad);
          c10::AutogradState::get_tls_state().set_fw_grad_mode(fw_grad);
          context = CallerContext::capture();
          there = {};
        });
        in_new_thread([&] {
          const Modes before;
          {
            const CallerContext::Scope scope(context);
            CHECK(Modes{} == there);
          }
          CHECK(Modes{} == before);
        });
      }
    }
  }
}

TEST_CASE_FIXTURE(Rules, "a context without inference mode leaves it for the scope") {
  const CallerContext context = CallerContext::capture();
  in_new_thread([&] {
    const c10::InferenceMode mode(true);
    c10::AutogradState::get_tls_state().set_grad_mode(true);
    const Modes before;
    {
      const CallerContext::Scope scope(context);
      CHECK_FALSE(c10::InferenceMode::is_enabled());
      CHECK(c10::GradMode::is_enabled());
    }
    CHECK(Modes{} == before);
  });
}

TEST_CASE_FIXTURE(Rules, "a context carries and restores autocast, dtype and cache flag") {
  CallerContext context;
  in_new_thread([&] {
    at::autocast::set_autocast_enabled(kCpu, true);
    at::autocast::set_autocast_dtype(kCpu, at::kHalf);
    at::autocast::set_autocast_cache_enabled(false);
    context = CallerContext::capture();
  });
  in_new_thread([&] {
    const Modes before;
    CHECK_FALSE(before.autocast);
    {
      const CallerContext::Scope scope(context);
      CHECK(at::autocast::is_autocast_enabled(kCpu));
      CHECK_FALSE(at::autocast::is_autocast_enabled(c10::DeviceType::CUDA));
      CHECK((at::autocast::get_autocast_dtype(kCpu) == at::kHalf));
      CHECK_FALSE(at::autocast::is_autocast_cache_enabled());
    }
    CHECK(Modes{} == before);
  });
}

TEST_CASE_FIXTURE(Rules, "a context without autocast disables it for the scope only") {
  const CallerContext context = CallerContext::capture();
  in_new_thread([&] {
    at::autocast::set_autocast_enabled(kCpu, true);
    at::autocast::set_autocast_dtype(kCpu, at::kHalf);
    const Modes before;
    {
      const CallerContext::Scope scope(context);
      CHECK_FALSE(at::autocast::is_autocast_enabled(kCpu));
    }
    CHECK(Modes{} == before);
  });
}

TEST_CASE_FIXTURE(Rules, "scopes of contexts nest") {
  CallerContext no_grad;
  in_new_thread([&] {
    c10::AutogradState::get_tls_state().set_grad_mode(false);
    no_grad = CallerContext::capture();
  });
  const CallerContext plain = CallerContext::capture();
  const CallerContext::Scope outer(no_grad);
  CHECK_FALSE(c10::GradMode::is_enabled());
  {
    const CallerContext::Scope inner(plain);
    CHECK(c10::GradMode::is_enabled());
  }
  CHECK_FALSE(c10::GradMode::is_enabled());
}

TEST_CASE_FIXTURE(Rules, "a scope restores modes that a callback changes in it") {
  const CallerContext context = CallerContext::capture();
  const Modes before;
  {
    const CallerContext::Scope scope(context);
    c10::AutogradState::get_tls_state().set_grad_mode(false);
    c10::AutogradState::get_tls_state().set_fw_grad_mode(false);
  }
  CHECK(Modes{} == before);
}

TEST_SUITE_END();
