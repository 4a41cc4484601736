#include "store/client/bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/client/reads.h"
#include "store/client/window.h"
#include "store/client/writes.h"

namespace rpc_ext::store::client {
namespace {

using Keys = std::vector<std::string>;

void write(const WindowPtr& self, const OperationPtr& operation, const Keys& keys, const py::sequence& sources,
           const py::sequence& expected) {
  std::vector<RequestPtr> requests;
  try {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto request = std::make_shared<WriteRequest>(keys[i], sources[i], expected[i], operation, i);
      // Not when it becomes ready: Python may raise, and may let other threads change the window.
      if (request->nbytes >= kLarge && !request->expected.is_none()) {
        request->due = call(self->expected_digest_class, request->key, request->nbytes, request->expected);
      }
      requests.push_back(request);
    }
  } catch (...) {
    const py::object error = error_of(std::current_exception());
    for (std::size_t i = 0; i < keys.size(); ++i) operation->end(i, py::none(), error);
    throw;
  }
  const auto copy_to_host = [&] {
    for (const RequestPtr& request : requests) static_cast<WriteRequest&>(*request).copy_to_host(self);
  };
  try {
    self->submit(requests);
  } catch (...) {  // Ctrl-C ends the call, but no request
    copy_to_host();
    throw;
  }
  copy_to_host();
}

// A target is None for a new tensor on the host, a tensor on the host, or a DeviceTarget of Python.
void read(const WindowPtr& self, const OperationPtr& operation, const Keys& keys, const py::sequence& targets,
          bool has_digests) {
  std::vector<RequestPtr> requests;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    py::object target = targets[i];
    py::object out = target;
    if (THPVariable_Check(target.ptr())) {
      target = py::none();
    } else if (!target.is_none()) {
      out = target.attr("out");
    }
    requests.push_back(std::make_shared<ReadRequest>(keys[i], std::move(target), out.cast<std::optional<at::Tensor>>(),
                                                     has_digests, operation, i));
  }
  self->submit(requests);
}

void erase(const WindowPtr& self, const OperationPtr& operation, const Keys& keys) {
  std::vector<RequestPtr> requests;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    requests.push_back(std::make_shared<DeleteRequest>(keys[i], operation, i));
  }
  self->submit(requests);
}

}  // namespace

void bind(py::module_& m) {
  py::class_<StoreOperation, OperationPtr>(m, "StoreOperation")
      .def(py::init<std::size_t, bool, py::object, py::object>(), py::arg("count"), py::arg("has_values"),
           py::arg("complete"), py::arg("join"))
      .def("end", &StoreOperation::end, py::arg("index"), py::arg("value").none(true), py::arg("error").none(true));

  py::class_<StoreMessage, MessagePtr>(m, "StoreMessage")
      .def_property_readonly("verb", [](const StoreMessage& self) { return static_cast<int>(self.verb); })
      .def(
          "answered",
          [](StoreMessage& self, const py::bytes& body, const std::vector<at::Tensor>& tensors) {
            self.answered(std::string_view(body), tensors);
          },
          py::arg("body"), py::arg("tensors"))
      .def("failed", &StoreMessage::failed, py::arg("error"));

  py::class_<Window, WindowPtr>(m, "StoreWindow")
      .def(py::init([](py::object channel, std::string service, const py::bytes& token, std::string worker,
                       std::uint64_t size, double seconds, py::object buffers) {
             return std::make_shared<Window>(std::move(channel), std::move(service), std::string(token),
                                             std::move(worker), size, seconds, std::move(buffers));
           }),
           py::arg("channel"), py::arg("service"), py::arg("token"), py::arg("worker"), py::arg("size"),
           py::arg("seconds"), py::arg("buffers"))
      .def("write", write, py::arg("operation"), py::arg("keys"), py::arg("sources"), py::arg("expected"))
      .def("read", read, py::arg("operation"), py::arg("keys"), py::arg("targets"), py::arg("has_digests"))
      .def("delete", erase, py::arg("operation"), py::arg("keys"))
      .def("look", &Window::look, py::arg("now"))
      .def("statistics", &Window::statistics)
      .def_readonly("buffers", &Window::buffers)
      .def_property("channel", &Window::channel, &Window::set_channel)
      .def_readwrite("size", &Window::size)
      .def_property(
          "token", [](const Window& self) { return py::bytes(self.token); },
          [](Window& self, const py::bytes& token) { self.token = std::string(token); })
      .def_property("seconds", [](const Window& self) { return self.seconds(); }, &Window::set_seconds);
}

}  // namespace rpc_ext::store::client
