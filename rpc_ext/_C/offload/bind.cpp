// The native half of remote offload, for Python.
#include "offload/bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "offload/namespace.h"
#include "offload/order.h"
#include "offload/parser.h"
#include "offload/service.h"
#include "offload/session.h"
#include "offload/wire.h"

namespace rpc_ext::offload {
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
  const WithoutGil released_;
};

template <class... Arguments>
void call_reporting(const std::shared_ptr<Held>& function, const Arguments&... arguments) {
  const Gil gil;
  if (!gil) return;
  try {
    function->get()(arguments...);
  } catch (py::error_already_set& e) {
    e.discard_as_unraisable("rpc_ext: a function of an offload service");
  }
}

// Calls a function without arguments once. A thread of the store neither takes the GIL nor drops the function.
Begin begin_of(py::function function, StorePtr store) {
  return [held = std::make_shared<Held>(std::move(function)), store = std::move(store)]() mutable {
    if (is_python_thread || store == nullptr) return call_reporting(held);
    store->call_elsewhere([held = std::move(held)] { call_reporting(held); });
  };
}

// ---- values

py::object text_of(std::string_view text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

py::tuple to_python(const Problem& problem) {
  return py::make_tuple(static_cast<int>(problem.kind), text_of(problem.message), text_of(problem.path), problem.code,
                        problem.offset, problem.wanted, problem.got);
}

Problem problem_from(const py::tuple& of) {
  const auto kind = of[0].cast<int>();
  return {static_cast<Problem::Kind>(kind), of[1].cast<std::string>(),   of[2].cast<std::string>(),
          of[3].cast<std::int32_t>(),       of[4].cast<std::uint64_t>(), of[5].cast<std::uint64_t>(),
          of[6].cast<std::uint64_t>()};
}

py::tuple to_python(Verb verb, const Entry& entry) {
  if (verb == Verb::fetch) return py::make_tuple(entry.sequence, entry.part);
  if (verb != Verb::put) return py::make_tuple(entry.sequence, entry.after, entry.expires, entry.key);
  return py::make_tuple(entry.sequence, entry.after, entry.expires, entry.key, entry.dtype,
                        py::tuple(py::cast(entry.sizes)), entry.nbytes, entry.part, entry.at, entry.length,
                        entry.digest);
}

Entry entry_from(Verb verb, const py::tuple& of) {
  Entry entry;
  entry.sequence = of[0].cast<std::uint64_t>();
  if (verb == Verb::fetch) {
    entry.part = of[1].cast<std::uint32_t>();
    return entry;
  }
  entry.after = of[1].cast<std::uint64_t>();
  entry.expires = of[2].cast<double>();
  entry.key = of[3].cast<std::string>();
  if (verb != Verb::put) return entry;
  entry.dtype = of[4].cast<at::ScalarType>();
  entry.sizes = of[5].cast<std::vector<std::int64_t>>();
  entry.nbytes = of[6].cast<std::uint64_t>();
  entry.part = of[7].cast<std::uint32_t>();
  entry.at = of[8].cast<std::uint32_t>();
  entry.length = of[9].cast<std::uint32_t>();
  entry.digest = of[10].cast<std::uint64_t>();
  return entry;
}

py::tuple to_python(Verb verb, const Found& found) {
  if (verb == Verb::fetch) return py::make_tuple(found.at, found.length, found.digest);
  const py::object kept = found.has_kept ? py::object(py::make_tuple(found.kept, found.seed)) : py::none();
  return py::make_tuple(found.dtype, py::tuple(py::cast(found.sizes)), found.nbytes, found.at, found.length,
                        found.digest, kept);
}

Found found_from(Verb verb, const py::tuple& of) {
  Found found;
  const std::size_t first = verb == Verb::fetch ? 0 : 3;
  found.at = of[first].cast<std::uint32_t>();
  found.length = of[first + 1].cast<std::uint32_t>();
  found.digest = of[first + 2].cast<std::uint64_t>();
  if (verb == Verb::fetch) return found;
  found.dtype = of[0].cast<at::ScalarType>();
  found.sizes = of[1].cast<std::vector<std::int64_t>>();
  found.nbytes = of[2].cast<std::uint64_t>();
  if (const py::object kept = of[6]; !kept.is_none()) {
    found.has_kept = true;
    std::tie(found.kept, found.seed) = kept.cast<std::pair<std::uint64_t, std::uint64_t>>();
  }
  return found;
}

Verb verb_from(int number) {
  if (number < 1 || number > static_cast<int>(Verb::abandon)) throw std::invalid_argument("there is no such verb");
  return static_cast<Verb>(number);
}

py::tuple to_python(Message&& message) {
  return py::make_tuple(py::bytes(message.body.data(), message.body.size()), py::cast(message.tensors));
}

py::tuple to_python(const Request& request) {
  py::list entries;
  for (const Entry& entry : request.entries) entries.append(to_python(request.verb, entry));
  return py::make_tuple(static_cast<int>(request.verb), py::bytes(request.token), request.sent, request.oldest,
                        request.service, entries, request.data);
}

// ---- messages

py::tuple pack_request_of(int verb, const std::string& token, double sent, std::uint64_t oldest,
                          const std::string& service, const py::sequence& entries, const at::Tensor& data) {
  Request request;
  request.verb = verb_from(verb);
  request.token = token;
  request.token.resize(kToken);
  request.sent = sent;
  request.oldest = oldest;
  request.service = service;
  for (const py::handle entry : entries) request.entries.push_back(entry_from(request.verb, entry.cast<py::tuple>()));
  request.data = data;
  return to_python(pack_request(request));
}

py::tuple pack_answer_of(int verb, std::size_t count, const py::sequence& errors, const py::sequence& entries,
                         const std::optional<at::Tensor>& data) {
  Errors problems;
  for (const py::handle error : errors) {
    const auto pair = error.cast<py::tuple>();
    problems.emplace_back(pair[0].cast<std::size_t>(), problem_from(pair[1].cast<py::tuple>()));
  }
  std::vector<Found> found;
  for (const py::handle entry : entries) found.push_back(found_from(verb_from(verb), entry.cast<py::tuple>()));
  return to_python(pack_answer("", count, problems, verb_from(verb), found, data ? *data : no_data()));
}

py::tuple parse_answer_of(int verb, std::size_t count, const py::bytes& body, const std::vector<at::Tensor>& tensors) {
  const Answer answer = parse_answer(verb_from(verb), count, std::string_view(body), tensors);
  py::list errors, entries;
  for (const auto& [index, problem] : answer.errors) errors.append(py::make_tuple(index, to_python(problem)));
  for (const Found& found : answer.entries) entries.append(to_python(verb_from(verb), found));
  return py::make_tuple(errors, entries, answer.data);
}

// ---- services

std::shared_ptr<Service> make_service(const py::capsule& store, std::uint64_t window, py::function slow) {
  return std::make_shared<Service>(
      store_from(store), window,
      [held = std::make_shared<Held>(std::move(slow))](const Request& request, const Service::ReplyPtr& reply) {
        const Gil gil;
        if (gil) held->get()(to_python(request), py::cast(reply));
      });
}

void handle(Service& self, const py::bytes& body, const std::vector<at::Tensor>& tensors,
            const Service::SessionPtr& session, const Service::ReplyPtr& reply) {
  Request request = parse_request(std::string_view(body), tensors);
  const OutsidePython released;
  self.handle(std::move(request), session, reply);
}

py::dict statistics(const Service& self) {
  const Service::Statistics found = self.statistics();
  py::dict counts;
  counts["under_way"] = found.in_flight;
  counts["most_under_way"] = found.most_in_flight;
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

void bind_messages(py::module_& m) {
  m.def("offload_dtypes", [] { return py::cast(dtypes()); });
  m.def(
      "service_of", [](const py::bytes& body) { return std::string(service_of(std::string_view(body))); },
      py::arg("body"));
  m.def("pack_request", pack_request_of, py::arg("verb"), py::arg("token"), py::arg("sent"), py::arg("oldest"),
        py::arg("service"), py::arg("entries"), py::arg("data"));
  m.def(
      "parse_request",
      [](const py::bytes& body, const std::vector<at::Tensor>& tensors) {
        return to_python(parse_request(std::string_view(body), tensors));
      },
      py::arg("body"), py::arg("tensors"));
  m.def("pack_answer", pack_answer_of, py::arg("verb"), py::arg("count"), py::arg("errors"), py::arg("entries"),
        py::arg("data"));
  m.def("parse_answer", parse_answer_of, py::arg("verb"), py::arg("count"), py::arg("body"), py::arg("tensors"));
}

using OrderClass = py::class_<RequestOrder, std::shared_ptr<RequestOrder>>;
using NamespaceClass = py::class_<Namespace, std::shared_ptr<Namespace>>;
using SessionClass = py::class_<Session, std::shared_ptr<Session>>;
using ServiceClass = py::class_<Service, std::shared_ptr<Service>>;

void bind_order(OrderClass& order, NamespaceClass& space) {
  // What waits here may be begun by threads of a store; without one, in the thread that ends the wait.
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
             return std::make_shared<Session>(
                 std::move(space), std::move(order), access_from<PoolAccess>(pool, "PoolAccess of cudafuture"),
                 [held = std::make_shared<Held>(std::move(set_timer)), store](double seconds) {
                   store->call_elsewhere([held, seconds] { call_reporting(held, seconds); });
                 });
           }),
           py::arg("space"), py::arg("order"), py::arg("pool"), py::arg("set_timer"))
      .def_property(
          "is_watched", [](const Session& self) { return self.is_watched.load(); },
          [](Session& self, bool is_watched) { self.is_watched = is_watched; })
      .def_property_readonly("heard", [](const Session& self) { return self.heard.load(); })
      .def("drop", &Session::drop, py::arg("sequence"))
      .def("look", &Session::look, Released())
      .def("clear", &Session::clear);

  service.def(py::init(&make_service), py::arg("store"), py::arg("window"), py::arg("slow"))
      .def("add", &Service::add, py::arg("token"), py::arg("session"))
      .def("remove", &Service::remove, py::arg("token"))
      .def("handle", handle, py::arg("body"), py::arg("tensors"), py::arg("session"), py::arg("reply"))
      .def("count", &Service::count, py::arg("written") = 0, py::arg("read") = 0, py::arg("refused") = 0)
      .def(
          "count_in",
          [](Service& self, Session& session, std::uint64_t nbytes) -> py::object {
            const auto counted = self.count_in(session, nbytes);
            if (!counted) return to_python(self.over_window(session));
            return py::make_tuple(counted->nbytes, counted->since);
          },
          py::arg("session"), py::arg("nbytes"))
      .def(
          "count_out",
          [](Service& self, Session& session, std::uint64_t nbytes, double since) {
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

}  // namespace

void bind(py::module_& m) {
  // All classes before the first function: its signature names them.
  OrderClass order(m, "RequestOrder");
  NamespaceClass space(m, "Namespace");
  SessionClass session(m, "OffloadSession");
  ServiceClass service(m, "OffloadService");
  bind_messages(m);
  bind_order(order, space);
  bind_service(m, session, service);
}

}  // namespace rpc_ext::offload
