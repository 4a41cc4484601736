// The native half of remote stores, for Python.
#include "store/service/bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/service/namespace.h"
#include "store/service/order.h"
#include "store/service/service.h"
#include "store/service/store_session.h"
#include "store/wire/bind.h"
#include "store/wire/parser.h"

namespace rpc_ext::store {
namespace {

template <class Access>
std::shared_ptr<Access> access_from(const py::capsule& capsule, const char* name) {
  if (capsule.name() == nullptr || std::string_view(capsule.name()) != name) {
    throw py::type_error(std::string("expected a capsule of a ") + name);
  }
  return *capsule.get_pointer<std::shared_ptr<Access>>();
}

StorePtr store_from(const py::capsule& capsule) {
  return access_from<StoreAccess>(capsule, "StoreAccess of cudafuture");
}

// ---- functions of Python that native code calls

// True while this thread is in a call of Python's: functions of Python may run here.
thread_local bool is_python_thread = false;

// Releases the GIL for a call of Python's.
class OutsidePython {
 public:
  OutsidePython() : was_(std::exchange(is_python_thread, true)) {}
  ~OutsidePython() { is_python_thread = was_; }
  OutsidePython(const OutsidePython&) = delete;
  OutsidePython& operator=(const OutsidePython&) = delete;

 private:
  const bool was_;
  const GilRelease released_;
};

template <class... Arguments>
void call_reporting(const std::shared_ptr<Held>& function, const Arguments&... arguments) {
  const Gil gil;
  if (!gil) return;
  try {
    function->get()(arguments...);
  } catch (py::error_already_set& e) {
    e.discard_as_unraisable("rpc_ext: a function of a store service");
  }
}

// Calls a function without arguments once. A thread of the store neither takes the GIL nor drops the function.
Begin begin_of(py::function function, StorePtr store) {
  return [held = std::make_shared<Held>(std::move(function)), store = std::move(store)]() mutable {
    if (is_python_thread || store == nullptr) return call_reporting(held);
    store->call_elsewhere([held = std::move(held)] { call_reporting(held); });
  };
}

// ---- services

std::shared_ptr<Service> make_service(const py::capsule& store, std::uint64_t window, py::function slow) {
  return std::make_shared<Service>(
      store_from(store), window,
      [held = std::make_shared<Held>(std::move(slow))](const StoreRequest& request, const Service::ReplyPtr& reply) {
        const Gil gil;
        if (gil) held->get()(to_python(request), py::cast(reply));
      });
}

void handle(Service& self, const py::bytes& body, const std::vector<at::Tensor>& tensors,
            const Service::SessionPtr& session, const Service::ReplyPtr& reply) {
  StoreRequest request = parse_request(std::string_view(body), tensors);
  const OutsidePython released;
  self.handle(std::move(request), session, reply);
}

py::dict statistics(const Service& self) {
  const Service::Statistics found = self.statistics();
  py::dict counts;
  counts["in_flight"] = found.in_flight;
  counts["most_in_flight"] = found.most_in_flight;
  counts["bytes_written"] = found.written;
  counts["bytes_read"] = found.read;
  counts["requests"] = found.requests;
  counts["refused"] = found.refused;
  counts["late"] = found.late;
  counts["latency_p50"] = found.latency_p50;
  counts["latency_p99"] = found.latency_p99;
  return counts;
}

using Released = py::call_guard<OutsidePython>;

using OrderClass = py::class_<RequestOrder, std::shared_ptr<RequestOrder>>;
using NamespaceClass = py::class_<Namespace, std::shared_ptr<Namespace>>;
using SessionClass = py::class_<StoreSession, std::shared_ptr<StoreSession>>;
using ServiceClass = py::class_<Service, std::shared_ptr<Service>>;

void bind_order(OrderClass& order, NamespaceClass& space) {
  // A thread of a store may begin a waiting operation. Without a store, the thread that ends the wait begins it.
  order
      .def(py::init([](double sent, const Service* service) {
             return std::make_shared<RequestOrder>(
                 sent, service == nullptr ? std::make_shared<std::atomic<std::uint64_t>>(0) : service->late());
           }),
           py::arg("sent"), py::arg("service").none(true))
      .def("note_arrival", &RequestOrder::note_arrival, py::arg("sent"), py::arg("oldest"))
      .def(
          "arrive",
          [](RequestOrder& self, const std::string& key, std::uint64_t after, py::function begin,
             const Namespace* space) {
            return self.arrive(key, after, begin_of(std::move(begin), space == nullptr ? nullptr : space->store()));
          },
          py::arg("key"), py::arg("after"), py::arg("begin"), py::arg("space").none(true))
      .def("note_change", &RequestOrder::note_change, py::arg("key"), py::arg("sequence"), py::arg("expires"))
      .def("pass_on", &RequestOrder::pass_on, py::arg("key"), py::arg("sequence"), Released())
      .def("end", &RequestOrder::end, Released())
      .def_property_readonly("remembered", &RequestOrder::remembered)
      .def("late", &RequestOrder::late, py::arg("expires"))
      .def("left", &RequestOrder::left, py::arg("expires"));

  space
      .def(py::init([](const py::capsule& store, std::string prefix, std::optional<std::uint64_t> capacity,
                       const std::vector<std::pair<std::string, std::uint64_t>>& sizes) {
             return std::make_shared<Namespace>(store_from(store), std::move(prefix), capacity, sizes);
           }),
           py::arg("store"), py::arg("prefix"), py::arg("capacity").none(true), py::arg("sizes"))
      .def_property_readonly("prefix", &Namespace::prefix)
      .def_property_readonly("is_empty", &Namespace::is_empty)
      .def("keys", &Namespace::keys)
      .def(
          "take",
          [](Namespace& self, std::uint64_t nbytes) {
            const auto problem = self.take(nbytes);
            return problem ? py::object(to_python(*problem)) : py::none();
          },
          py::arg("nbytes"))
      .def("give_back", &Namespace::give_back, py::arg("nbytes"))
      .def(
          "settle",
          [](Namespace& self, const std::string& key, std::uint64_t nbytes, bool has_succeeded) {
            self.settle(key, nbytes, has_succeeded, self.next_order());
          },
          py::arg("key"), py::arg("nbytes"), py::arg("has_succeeded"), Released())
      .def("clear", &Namespace::clear, Released())
      .def(
          "enter",
          [](Namespace& self, const std::string& key, bool is_change, py::function begin) {
            return self.queues.enter(key, is_change, begin_of(std::move(begin), self.store()));
          },
          py::arg("key"), py::arg("is_change"), py::arg("begin"))
      .def(
          "leave", [](Namespace& self, const std::string& key) { self.queues.leave(key); }, py::arg("key"), Released());
}

void bind_service(py::module_& m, SessionClass& session, ServiceClass& service) {
  session
      .def(py::init([](std::shared_ptr<Namespace> space, std::shared_ptr<RequestOrder> order, const py::capsule& pool,
                       py::function set_timer) {
             const StorePtr store = space->store();
             return std::make_shared<StoreSession>(
                 std::move(space), std::move(order), access_from<PoolAccess>(pool, "PoolAccess of cudafuture"),
                 [held = std::make_shared<Held>(std::move(set_timer)), store](double seconds) {
                   store->call_elsewhere([held, seconds] { call_reporting(held, seconds); });
                 });
           }),
           py::arg("space"), py::arg("order"), py::arg("pool"), py::arg("set_timer"))
      .def_property(
          "is_watched", [](const StoreSession& self) { return self.is_watched.load(); },
          [](StoreSession& self, bool is_watched) { self.is_watched = is_watched; })
      .def_property(
          "heard", [](const StoreSession& self) { return self.heard.load(); },
          [](StoreSession& self, double heard) { self.heard = heard; })
      .def("drop", &StoreSession::drop, py::arg("sequence"))
      .def("look", &StoreSession::look, Released())
      .def("clear", &StoreSession::clear);

  service.def(py::init(&make_service), py::arg("store"), py::arg("window"), py::arg("slow"))
      .def("add", &Service::add, py::arg("token"), py::arg("session"))
      .def("remove", &Service::remove, py::arg("token"))
      .def("handle", handle, py::arg("body"), py::arg("tensors"), py::arg("session"), py::arg("reply"))
      .def("count", &Service::count, py::arg("written") = 0, py::arg("read") = 0, py::arg("refused") = 0)
      .def(
          "count_in",
          [](Service& self, StoreSession& session, std::uint64_t nbytes) -> py::object {
            const auto counted = self.count_in(session, nbytes);
            if (!counted) return to_python(self.over_window(session));
            return py::make_tuple(counted->nbytes, counted->since);
          },
          py::arg("session"), py::arg("nbytes"))
      .def(
          "count_out",
          [](Service& self, StoreSession& session, std::uint64_t nbytes, double since) {
            self.count_out(session, {nbytes, since});
          },
          py::arg("session"), py::arg("nbytes"), py::arg("since"))
      .def("statistics", statistics)
      .def("close", &Service::close);

  m.def(
      "route_messages",
      [](const std::string& name, const std::shared_ptr<Service>& service) {
        if (service == nullptr) {
          MessageRoute::get().remove(name);
        } else {
          MessageRoute::get().add(name, service);
        }
      },
      py::arg("name"), py::arg("service").none(true));
  m.def(
      "use_native_handler",
      [](unsigned char number, bool is_on) {
        const std::shared_ptr<MessageHandler> route(&MessageRoute::get(), [](MessageHandler*) {});
        set_message_handler(number, is_on ? route : nullptr);
      },
      py::arg("number"), py::arg("is_on"));
}

// The problems that Python meets, too, in the same words.
void bind_problems(py::module_& m) {
  m.def("too_late", [](double seconds) { return to_python(too_late(seconds)); }, py::arg("seconds"));
  m.def("superseded", [](const std::string& key) { return to_python(superseded(key)); }, py::arg("key"));
  m.def(
      "bytes_differ", [](const std::string& key, std::uint64_t length) { return to_python(bytes_differ(key, length)); },
      py::arg("key"), py::arg("length"));
  m.def("no_such_key", [](const std::string& key) { return to_python(no_such_key(key)); }, py::arg("key"));
  m.def(
      "for_client",
      [](const std::string& key, const py::tuple& problem, std::uint64_t nbytes) {
        return to_python(for_client(key, problem_from(problem), nbytes));
      },
      py::arg("key"), py::arg("problem"), py::arg("nbytes"));
}

}  // namespace

void bind(py::module_& m) {
  // All classes before the first function: its signature names them.
  OrderClass order(m, "RequestOrder");
  NamespaceClass space(m, "Namespace");
  SessionClass session(m, "StoreSession");
  ServiceClass service(m, "StoreService");
  bind_messages(m);
  bind_problems(m);
  bind_order(order, space);
  bind_service(m, session, service);
}

}  // namespace rpc_ext::store
