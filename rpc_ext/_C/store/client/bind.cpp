#include "store/client/bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sendable.h"
#include "store/client/reads.h"
#include "store/client/window.h"
#include "store/client/writes.h"

namespace rpc_ext::store::client {
namespace {

using Keys = std::vector<std::string>;

std::string key_of(py::handle object) {
  if (!PyUnicode_Check(object.ptr())) {
    throw py::type_error("a key is a str, not " + py::repr(object).cast<std::string>());
  }
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    throw py::value_error("the key " +
                          py::str(py::module_::import("builtins").attr("ascii")(object)).cast<std::string>() +
                          " is not UTF-8");
  }
  std::string key(text, static_cast<std::size_t>(size));
  if (const auto fault = key_fault(key)) throw py::value_error(*fault);
  return key;
}

Keys keys_of(const py::list& objects) {
  Keys keys;
  for (const py::handle object : objects) keys.push_back(key_of(object));
  return keys;
}

using Kind = StoreOperation::Kind;

class ChannelSender final : public MessageSender {
 public:
  explicit ChannelSender(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  bool send(std::string_view body, std::vector<at::Tensor> tensors, double seconds,
            const MessagePtr& message) override {
    const Channel::Outcome outcome = channel_->send(body, std::move(tensors), seconds, message);
    if (outcome != Channel::Outcome::ended) return outcome == Channel::Outcome::sent;
    if (const Gil gil; gil) throw PythonException(channel_->error());
    return true;
  }
  const std::shared_ptr<Channel>& channel() const noexcept { return channel_; }

 private:
  const std::shared_ptr<Channel> channel_;
};

// An object of Python with the `send` of a channel.
class PythonSender final : public MessageSender {
 public:
  explicit PythonSender(py::object channel) : channel_(std::move(channel)) {}
  bool send(std::string_view body, std::vector<at::Tensor> tensors, double seconds,
            const MessagePtr& message) override {
    const Gil gil;
    if (!gil) return true;
    try {
      call(channel_.get().attr("send"), py::bytes(body.data(), body.size()), std::move(tensors), seconds, message);
      return true;
    } catch (py::error_already_set& e) {
      if (e.matches(PyExc_BlockingIOError)) return false;
      throw PythonException(e.value());
    }
  }
  py::handle channel() const { return channel_.get(); }

 private:
  const Held channel_;
};

MessageSenderPtr sender_of(const py::object& channel) {
  if (py::isinstance<Channel>(channel)) {
    return std::make_shared<ChannelSender>(channel.cast<std::shared_ptr<Channel>>());
  }
  return std::make_shared<PythonSender>(channel);
}

py::object channel_of(const Window& self) {
  const MessageSenderPtr sender = self.options().sender;
  if (const auto* const native = dynamic_cast<const ChannelSender*>(sender.get())) return py::cast(native->channel());
  return py::reinterpret_borrow<py::object>(static_cast<const PythonSender&>(*sender).channel());
}

// A property for one of a window's options.
template <class Get, class Set>
void bind_option(py::class_<Window, WindowPtr>& window, const char* name, Get get, Set set) {
  window.def_property(
      name, [get](const Window& self) { return get(self.options()); },
      [set](Window& self, const py::object& value) {
        Window::Options options = self.options();
        set(options, value);
        self.set_options(std::move(options));
      });
}

WindowPtr make_window(const py::object& channel, std::string service, const py::bytes& token, std::string worker,
                      std::uint64_t size, double seconds, py::object name_error, py::object schedule) {
  api::load_hash();
  const auto set_timer = [held = std::make_shared<Held>(std::move(schedule))](const WindowPtr& window, double due) {
    if (const Gil gil; gil) call(held->get(), window, due);
  };
  return std::make_shared<Window>(
      std::make_shared<Operations>(std::move(worker), std::move(name_error)),
      Window::Options{sender_of(channel), std::move(service), std::string(token), size, seconds, set_timer});
}

std::shared_ptr<api::Results> results_in(const py::object& tensor) {
  return tensor.is_none() ? nullptr : api::results_in(tensor.ptr());
}

void expect_sendable(const api::Source& source) {
  if (std::find(dtypes().begin(), dtypes().end(), source.dtype()) == dtypes().end()) {
    throw TensorFault("tensors of " + py::repr(py::cast(source.dtype())).cast<std::string>() + " cannot be sent");
  }
  if (source.sizes().size() > kMostDimensions) {
    throw std::invalid_argument("a tensor has at most " + std::to_string(kMostDimensions) + " dimensions, not " +
                                std::to_string(source.sizes().size()));
  }
}

// `expected`: the digest of each tensor, or None. `written`: a tensor that receives True for each key that was written.
py::object write(const WindowPtr& self, const py::list& names, const py::object& tensors, int priority,
                 const std::vector<std::optional<std::uint64_t>>& expected, const py::object& written) {
  Keys keys = keys_of(names);
  auto sources = api::sources_of(tensors.ptr(), priority);
  if (keys.size() != sources.size() || keys.size() != expected.size()) {
    throw std::invalid_argument("the number of tensors differs from the number of keys: pass one for each key");
  }
  StoreOperation::Options options{.priority = priority, .results = results_in(written)};
  for (const auto& source : sources) {
    expect_sendable(*source);
    options.nbytes += source->nbytes();
  }
  const auto operation =
      std::make_shared<StoreOperation>(self->operations(), Kind::write, std::move(keys), std::move(options));
  std::vector<RequestPtr> requests;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    requests.push_back(std::make_shared<WriteRequest>(std::move(sources[i]), expected[i], operation, i));
  }
  self->submit(requests);
  for (const RequestPtr& request : requests) static_cast<WriteRequest&>(*request).copy_to_host(self);
  return operation->future();
}

// `outs`: the tensors to be filled, or None. `device`: of new tensors; None: the host. `digests`: a tensor that
// receives the digests of the tensors, or None.
py::object read(const WindowPtr& self, const py::list& names, const py::object& outs, const py::object& device,
                int priority, bool gives_list, const py::object& digests) {
  Keys keys = keys_of(names);
  StoreOperation::Options options{.priority = priority, .gives_list = gives_list, .results = results_in(digests)};
  options.targets = api::targets_of(keys.size(), outs.is_none() ? nullptr : outs.ptr(),
                                    device.is_none() ? nullptr : device.ptr(), priority);
  const std::size_t count = keys.size();
  const auto operation =
      std::make_shared<StoreOperation>(self->operations(), Kind::read, std::move(keys), std::move(options));
  std::vector<RequestPtr> requests;
  for (std::size_t i = 0; i < count; ++i) requests.push_back(std::make_shared<ReadRequest>(operation, i));
  self->submit(requests);
  return operation->future();
}

py::object erase(const WindowPtr& self, const py::list& names) {
  Keys keys = keys_of(names);
  const std::size_t count = keys.size();
  const auto operation =
      std::make_shared<StoreOperation>(self->operations(), Kind::erase, std::move(keys), StoreOperation::Options{});
  std::vector<RequestPtr> requests;
  for (std::size_t i = 0; i < count; ++i) requests.push_back(std::make_shared<DeleteRequest>(operation, i));
  self->submit(requests);
  return operation->future();
}

py::dict statistics(const Window& self) {
  const Window::Statistics window = self.statistics();
  const Operations::Statistics operations = self.operations()->statistics();
  py::dict counts;
  counts["pending"] = operations.pending;
  counts["in_flight"] = window.in_flight;
  counts["waiting"] = window.waiting;
  counts["window"] = window.size;
  counts["bytes_written"] = operations.written;
  counts["bytes_read"] = operations.read;
  counts["operations"] = operations.operations;
  counts["failed"] = operations.failed;
  counts["repeated"] = window.replaced;
  counts["latency_p50"] = operations.latency_p50;
  counts["latency_p99"] = operations.latency_p99;
  return counts;
}

}  // namespace

void bind(py::module_& m) {
  m.def("expect_key", [](py::handle key) { key_of(key); }, py::arg("key"));

  py::class_<StoreMessage, MessagePtr>(m, "StoreMessage")
      .def_property_readonly("verb", [](const StoreMessage& self) { return static_cast<int>(self.verb); })
      .def(
          "answered",
          [](StoreMessage& self, const py::bytes& body, const std::vector<at::Tensor>& tensors) {
            self.answered(std::string_view(body), tensors);
          },
          py::arg("body"), py::arg("tensors"))
      .def("failed", &StoreMessage::failed, py::arg("error"));

  py::class_<Window, WindowPtr> window(m, "StoreWindow");
  window
      .def(py::init(&make_window), py::arg("channel"), py::arg("service"), py::arg("token"), py::arg("worker"),
           py::arg("size"), py::arg("seconds"), py::arg("name_error"), py::arg("schedule"))
      .def("write", write, py::arg("keys"), py::arg("tensors"), py::arg("priority"), py::arg("expected"),
           py::arg("written").none(true))
      .def("read", read, py::arg("keys"), py::arg("outs").none(true), py::arg("device").none(true), py::arg("priority"),
           py::arg("gives_list"), py::arg("digests").none(true))
      .def("delete", erase, py::arg("keys"))
      .def(
          "flush", [](const Window& self, bool with_reads) { return self.operations()->flush(with_reads); },
          py::arg("with_reads"))
      .def("look", &Window::look, py::arg("now"), py::call_guard<GilRelease>())
      .def("statistics", statistics);
  window.def_property("channel", channel_of, [](Window& self, const py::object& channel) {
    Window::Options options = self.options();
    options.sender = sender_of(channel);
    self.set_options(std::move(options));
  });
  bind_option(
      window, "size", [](const Window::Options& options) { return options.size; },
      [](Window::Options& options, const py::object& size) { options.size = size.cast<std::uint64_t>(); });
  bind_option(
      window, "seconds", [](const Window::Options& options) { return options.seconds; },
      [](Window::Options& options, const py::object& seconds) { options.seconds = seconds.cast<double>(); });
  bind_option(
      window, "token", [](const Window::Options& options) { return py::bytes(options.token); },
      [](Window::Options& options, const py::object& token) { options.token = token.cast<std::string>(); });
}

}  // namespace rpc_ext::store::client
