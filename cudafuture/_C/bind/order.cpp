#include "bind/order.h"

#include <algorithm>
#include <string>

#include "bind/errors.h"
#include "bind/executors.h"
#include "bind/future.h"
#include "core/completion_order_executor.h"
#include "core/issue_order.h"
#include "core/process.h"
#include "core/thread_cache.h"

namespace cudafuture::bind {

thread_local constinit CallbackOrder::Kind CallbackOrder::current_{};

namespace {

// Returns the serial queue whose callback issues a collective on the group with these ordered callbacks. None: the
// program itself.
nb::object issuing_serial_queue(const HostExecutor& callbacks) {
  refuse_after_fork();
  using Kind = CallbackOrder::Kind;
  const Kind here = CallbackOrder::current();
  if (here.kind == Kind::is_in_serial_queue) return nb::str(SerialQueue::current()->name().c_str());
  if (here.kind == Kind::is_by_completion) {
    raise_error(
        "InvalidStateError",
        "a collective cannot be issued in a callback that runs whenever its future happens to be done: the "
        "ranks would issue in different orders, and get each other's data. Give then() the executor of the "
        "group, executor=ProcessGroup(group).queue: its callbacks run in the order in which they were attached");
  }
  const OrderedExecutor* order = callbacks.executor->ordered();
  if (here.kind == Kind::is_beside && order != nullptr && here.order->shares_queues_with(*order)) {
    raise_error("InvalidStateError",
                "a collective on group '" + order->name() +
                    "' cannot be issued in a callback of that group's futures that runs on an executor of its own: "
                    "nothing orders it among those that other callbacks and the program issue, and the ranks would get "
                    "each other's data. Leave out executor=, or issue it on another group (new_group()), on which "
                    "only this callback issues");
  }
  return nb::none();
}

constexpr std::chrono::milliseconds kSlice{50};  // the maximum delay of Ctrl-C and of the process's exit

// Waits until all callbacks attached before this point have run. False: `timeout` seconds have passed.
bool wait_for_issue_order(double timeout) {
  const ParkingScope parking;
  refuse_after_fork();
  IssueOrder& order = IssueOrder::get();
  if (order.wait_until(Clock::now())) return true;
  const Deadline deadline = deadline_in(nb::float_(timeout));
  for (;;) {
    const Clock::time_point slice = Clock::now() + kSlice;
    bool is_turn;
    {
      const WithoutGil released;
      is_turn = order.wait_until(deadline ? std::min(slice, *deadline) : slice);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (is_turn) return true;
    if (deadline && Clock::now() >= *deadline) return false;
    if (is_shut_down()) raise_error("InvalidStateError", "the process is exiting: no more collectives can be issued");
  }
}

}  // namespace

void bind_order(nb::module_& m) {
  m.def(
      "ordered_executor",
      [](std::string name, bool in_issue_order) {
        return HostExecutor{name, &OrderedExecutor::make(name, in_issue_order)};
      },
      nb::arg("name"), nb::arg("in_issue_order") = false);
  m.def(
      "serial_executor",
      [](const std::string& name) {
        return HostExecutor{"serial(\"" + name + "\")", &CompletionOrderExecutor::make(name)};
      },
      nb::arg("name"));
  m.def("wait_for_issue_order", wait_for_issue_order, nb::arg("timeout"));
  m.def("issuing_serial_queue", issuing_serial_queue, nb::arg("callbacks"));
  m.def("refuse_after_fork", refuse_after_fork);
  m.def("set_leavable", ThreadCache::set_leavable, nb::arg("leavable"));
}

}  // namespace cudafuture::bind
