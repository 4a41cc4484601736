#include "api/order.h"

#include "bind/order.h"
#include "core/issue_order.h"

namespace cudafuture::api {

bool is_in_callback() noexcept {
  using Kind = bind::CallbackOrder::Kind;
  return bind::CallbackOrder::current().kind != Kind::is_program;
}

bool is_issue_turn() { return IssueOrder::get().wait_until(IssueOrder::Clock::now()); }

}  // namespace cudafuture::api
