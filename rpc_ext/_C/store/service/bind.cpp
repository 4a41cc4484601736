// The native half of remote stores, for Python.
#include "store/service/bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/store.h"
#include "api/thread.h"
#include "store/service/namespace.h"
#include "store/service/order.h"
#include "store/service/service.h"
#include "store/service/store_session.h"
#include "store/wire/parser.h"

namespace rpc_ext::store {
namespace {

// Returns a function that calls one of Python on another thread.
StoreSession::SetTimer timer_of(py::function function) {
  return [held = std::make_shared<Held>(std::move(function))](double seconds, const std::function<void()>& failed) {
    api::call_elsewhere([held, seconds, failed] {
      const Gil gil;
      if (!gil) return;
      try {
        held->get()(seconds);
      } catch (py::error_already_set& e) {
        failed();
        e.discard_as_unraisable("rpc_ext: the timer of a store service");
      }
    });
  };
}

void handle(Service& self, const py::bytes& body, const std::vector<at::Tensor>& tensors,
            const Service::SessionPtr& session, const Service::ReplyPtr& reply) {
  StoreRequest request = parse_request(std::string_view(body), tensors);
  const GilRelease released;
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

using Released = py::call_guard<GilRelease>;

}  // namespace

void bind(py::module_& m) {
  // All classes before the first function: its signature names them.
  py::class_<RequestOrder, std::shared_ptr<RequestOrder>> order(m, "RequestOrder");
  py::class_<Namespace, std::shared_ptr<Namespace>> space(m, "Namespace");
  py::class_<StoreSession, std::shared_ptr<StoreSession>> session(m, "StoreSession");
  py::class_<Service, std::shared_ptr<Service>> service(m, "StoreService");
  m.attr("PART") = kPart;
  m.attr("LONGEST_KEY") = kLongestKey;
  m.attr("TOKEN") = kToken;

  order
      .def(py::init([](double sent, const Service& service) {
             return std::make_shared<RequestOrder>(sent, service.late());
           }),
           py::arg("sent"), py::arg("service"))
      .def("end", &RequestOrder::end, Released());

  space
      .def(py::init([](const py::object& store, std::string prefix, std::optional<std::uint64_t> capacity,
                       const std::vector<std::pair<std::string, std::uint64_t>>& sizes) {
             return std::make_shared<Namespace>(api::store_of(store.ptr()), std::move(prefix), capacity, sizes);
           }),
           py::arg("store"), py::arg("prefix"), py::arg("capacity").none(true), py::arg("sizes"))
      .def_property_readonly("prefix", &Namespace::prefix)
      .def_property_readonly("is_empty", &Namespace::is_empty)
      .def("keys", &Namespace::keys)
      .def("clear", &Namespace::clear, Released());

  session
      .def(py::init([](std::shared_ptr<Namespace> space, std::shared_ptr<RequestOrder> order, std::uint64_t buffered,
                       py::function set_timer) {
             return std::make_shared<StoreSession>(std::move(space), std::move(order), buffered,
                                                   timer_of(std::move(set_timer)));
           }),
           py::arg("space"), py::arg("order"), py::arg("buffered"), py::arg("set_timer"))
      .def_property(
          "is_watched", [](const StoreSession& self) { return self.is_watched.load(); },
          [](StoreSession& self, bool is_watched) { self.is_watched = is_watched; })
      .def_property(
          "heard", [](const StoreSession& self) { return self.heard.load(); },
          [](StoreSession& self, double heard) { self.heard = heard; })
      .def("look", &StoreSession::look, Released())
      .def("end", &StoreSession::end, Released());

  service
      .def(py::init([](const py::object& store, std::uint64_t window) {
             return std::make_shared<Service>(api::store_of(store.ptr()), window);
           }),
           py::arg("store"), py::arg("window"))
      .def("add", &Service::add, py::arg("token"), py::arg("session"))
      .def("remove", &Service::remove, py::arg("token"))
      .def("handle", handle, py::arg("body"), py::arg("tensors"), py::arg("session"), py::arg("reply"))
      .def("count_refused", [](Service& self) { self.count(0, 0, 1); })
      .def("statistics", statistics);

  m.def(
      "service_of", [](const py::bytes& body) { return std::string(service_of(std::string_view(body))); },
      py::arg("body"));
  m.def(
      "token_of",
      [](const py::bytes& body, const std::vector<at::Tensor>& tensors) {
        return py::bytes(parse_request(std::string_view(body), tensors).token);
      },
      py::arg("body"), py::arg("tensors"));
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
      [](unsigned char number, bool is_on) { set_message_handler(number, is_on ? &MessageRoute::get() : nullptr); },
      py::arg("number"), py::arg("is_on"));
}

}  // namespace rpc_ext::store
