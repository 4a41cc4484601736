// The Python module. It is made with pybind11, from torch's own headers, since it takes and gives torch's own objects.
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/py_rref.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <optional>

#include "agent.h"
#include "api/error.h"
#include "autograd.h"
#include "channel.h"
#include "destination.h"
#include "histogram.h"
#include "message_handler.h"
#include "python.h"
#include "receiving.h"
#include "references.h"
#include "sendable.h"
#include "store/client/bind.h"
#include "store/service/bind.h"

namespace rpc_ext {
namespace {

Bytes bytes_from(const py::bytes& object) {
  const std::string_view view = object;
  return {view.begin(), view.end()};
}

// A listener of Python: on_reply(payload, tensors), on_error(kind, message).
class PythonCallListener final : public CallListener {
 public:
  explicit PythonCallListener(py::object listener) : listener_(std::move(listener)) {}

  void on_reply(std::string_view payload, const std::vector<at::Tensor>& tensors) override {
    tell("on_reply", [&](const py::object& method) {
      call_python(method, py::bytes(payload.data(), payload.size()), py::cast(tensors));
    });
  }

  void on_error(CallFailure kind, const std::string& message) override {
    tell("on_error", [&](const py::object& method) {
      call_python(method, py::int_(static_cast<int>(kind)),
                  py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(message.data(), message.size(), "replace")));
    });
  }

 private:
  template <class Call>
  void tell(const char* method, const Call& call) {
    run_with_gil("rpc_ext: completing a call", [&] {
      const py::object listener = listener_.take();
      call(listener.attr(method));
    });
  }

  Held listener_;
};

void send_call(Agent& self, int to, const py::bytes& payload, std::vector<at::Tensor> tensors, float timeout,
               py::object listener) {
  self.call(to, bytes_from(payload), std::move(tensors), timeout,
            std::make_shared<PythonCallListener>(std::move(listener)));
}

void send(Reply& self, const py::bytes& payload, std::vector<at::Tensor> tensors) {
  Bytes bytes = bytes_from(payload);
  bool first;
  {
    const GilRelease without_gil;
    first = self.send(std::move(bytes), std::move(tensors));
  }
  if (!first) throw std::runtime_error("the call was answered already");
}

// A listener of Python: answered(body, tensors), failed(error). Tests send messages from Python; a store client is
// native.
class PythonMessageListener final : public MessageListener {
 public:
  explicit PythonMessageListener(py::object listener) : listener_(std::move(listener)) {}

  void answered(std::string_view body, const std::vector<at::Tensor>& tensors) override {
    run_with_gil("rpc_ext: completing a message", [&] {
      const py::object listener = listener_.take();
      call(listener.attr("answered"), py::bytes(body.data(), body.size()), tensors);
    });
  }

  void failed(const py::object& error) override {
    const py::object listener = listener_.take();
    call(listener.attr("failed"), error);
  }

 private:
  Held listener_;
};

[[noreturn]] void raise_error(const py::object& error) {
  PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  throw py::error_already_set();
}

void send_message(Channel& self, const py::bytes& body, std::vector<at::Tensor> tensors, double seconds,
                  py::object listener) {
  switch (self.send(std::string_view(body), std::move(tensors), seconds,
                    std::make_shared<PythonMessageListener>(std::move(listener)))) {
    case Channel::Outcome::sent:
      return;
    case Channel::Outcome::no_room:
      raise_error(call(self.python_destination().attr("would_block")));
    case Channel::Outcome::ended:
      raise_error(self.error());
  }
}

// Counts the end of a call, which has the attributes size, started and settled; false: it was counted before.
bool finish(Destination& self, const py::object& ended, std::uint64_t received, bool has_failed) {
  if (ended.attr("settled").cast<bool>()) return false;
  ended.attr("settled") = true;
  self.finish(ended.attr("size").cast<std::uint64_t>(), ended.attr("started").cast<double>(), received, has_failed);
  return true;
}

bool stop(const std::shared_ptr<Agent>& self, double patience) {
  const GilRelease without_gil;
  return Agent::stop(self, std::chrono::duration<double>(patience));
}

// torch's own functions call the agent, too.
void raise_tensor_fault(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const TensorFault& e) {
    py::set_error(py::module_::import("cudafuture.errors").attr("TensorError"), e.what());
  }
}

// Raises the errors of the core's interface.
void raise_core_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const cudafuture::api::Failure& e) {
    cudafuture::api::set_error(e.problem());
  } catch (const cudafuture::api::PythonError&) {  // it is set
  }
}

// Calls a function that any thread holds, and drops it.
template <class... Arguments>
void call_held(Held& fn, const Arguments&... arguments) {
  run_with_gil("rpc_ext: a call with RRefs", [&] {
    const py::object taken = fn.take();
    call_python(taken, py::cast(arguments)...);
  });
}

// Calls `fn` when the future is done: now, or later in a thread of the agent's, in streams that come after its work.
void call_when_done(const c10::intrusive_ptr<rpc::JitFuture>& future, py::object fn) {
  if (future->completed()) {
    fn();  // the caller handles its exceptions, such as KeyboardInterrupt
    return;
  }
  auto held = std::make_shared<Held>(std::move(fn));
  const GilRelease without_gil;
  future->addCallback([held](rpc::JitFuture&) { call_held(*held); });
}

// Calls `fn` when the owners of all RRefs among the arguments have confirmed them: only then may they be used.
void when_rrefs_are_confirmed(py::object fn) {
  call_when_done(rpc::RRefContext::getInstance().waitForThreadLocalPendingRRefs(), std::move(fn));
}

c10::intrusive_ptr<rpc::OwnerRRef> owned(const rpc::PyRRef& rref) {
  auto owner = c10::dynamic_intrusive_pointer_cast<rpc::OwnerRRef>(rref.toIValue().toRRef());
  if (!owner) throw std::invalid_argument("another worker owns the RRef: call this on its owner");
  return owner;
}

// Gives an RRef its value, on the owner, unless it has one.
void set_value(const rpc::PyRRef& rref, const py::object& value) {
  const auto owner = owned(rref);
  if (!owner->getFuture()->completed()) owner->setValue(torch::jit::toIValue(value, c10::PyObjectType::get()));
}

// Calls `fn` on the owner when the value of an RRef is available, with the RRef that has the value.
//
// It may be another RRef than the given one: while the function that makes the value still runs, torch forgets an RRef
// without users, and makes another one for the value. So this function counts as a user meanwhile.
void when_owned(const rpc::PyRRef& rref, py::object fn) {
  const auto given = owned(rref);
  if (given->getFuture()->completed()) {
    fn(rref);
    return;
  }
  auto held = std::make_shared<Held>(std::move(fn));
  const GilRelease without_gil;
  auto& context = rpc::RRefContext::getInstance();
  const rpc::RRefId id = given->rrefId();
  const rpc::ForkId use = context.genGloballyUniqueId();
  context.addForkOfOwnerIfNotPresent(id, use);
  const auto tell = [held, id, use](const c10::intrusive_ptr<rpc::OwnerRRef>& owner) {
    owner->getFuture()->addCallback([held, owner, id, use](rpc::JitFuture&) {
      if (is_finalizing()) return;
      call_held(*held, rpc::PyRRef(owner));
      rpc::RRefContext::getInstance().delForkOfOwner(id, use);
    });
  };
  if (given->getFuture()->completed()) {  // before this counted, and torch may have forgotten it since
    tell(given);
  } else {
    context.getOwnerRRef(id)->addCallback(
        [tell](rpc::JitFuture& found) { tell(rpc::fromRRefInterface(found.constValue().toRRef())); });
  }
}

// Returns the bytes of a tensor on the host. They may be read while the caller holds the tensor.
py::memoryview memory(const at::Tensor& data) {
  if (!data.is_cpu() || !data.is_contiguous()) throw std::invalid_argument("expected a contiguous tensor on the host");
  return py::memoryview::from_memory(data.const_data_ptr(), static_cast<py::ssize_t>(data.nbytes()));
}

// The allocator is that of a capsule, which is kept; None: torch's own.
void receive_into_capsule(const std::optional<py::capsule>& allocator, std::size_t smallest, std::size_t largest) {
  if (!allocator) {
    receive_into(nullptr, smallest, largest);
    return;
  }
  if (allocator->name() == nullptr || std::string_view(allocator->name()) != "c10::Allocator") {
    throw py::type_error("expected a capsule of a c10::Allocator");
  }
  receive_into(allocator->get_pointer<c10::Allocator>(), smallest, largest);
  allocator->inc_ref();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::module_::import("torch.distributed.rpc");  // whose classes ours derives from
  remember_main_thread();
  py::register_exception_translator(raise_tensor_fault);
  py::register_exception_translator(raise_core_error);

  // Its destructor joins threads, which take the GIL to end.
  py::class_<Agent, rpc::TensorPipeAgent, std::shared_ptr<Agent>>(m, "Agent", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const std::vector<std::string>& names, int rank, py::object exchange,
                       const rpc::TensorPipeRpcBackendOptions& options,
                       const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
                       const std::vector<c10::Device>& devices, const py::bytes& key, bool contents, py::object serve,
                       py::object tell) {
             return Agent::make(names, rank, std::move(exchange), options, reverse_device_maps, devices,
                                {std::string_view(key), contents}, std::move(serve), std::move(tell));
           }),
           py::arg("names"), py::arg("rank"), py::arg("exchange"), py::arg("options"), py::arg("reverse_device_maps"),
           py::arg("devices"), py::kw_only(), py::arg("key"), py::arg("contents"), py::arg("serve"), py::arg("tell"))
      .def("call", send_call, py::arg("to"), py::arg("payload"), py::arg("tensors"), py::arg("timeout"),
           py::arg("listener"))
      .def("sent", &Agent::sent)
      .def("stop", stop, py::arg("patience"))
      .def("refused", &Agent::refused, py::call_guard<GilRelease>());

  // Its destructor may send.
  py::class_<Reply, std::shared_ptr<Reply>>(m, "Reply", py::release_gil_before_calling_cpp_dtor())
      .def("send", send, py::arg("payload"), py::arg("tensors"));

  py::class_<Histogram>(m, "Histogram")
      .def(py::init<>())
      .def("add", &Histogram::add, py::arg("ns"))
      .def_property_readonly("total", &Histogram::total)
      .def("quantile", &Histogram::quantile, py::arg("q"))
      .def("buckets", &Histogram::buckets);

  py::class_<Destination, DestinationPtr>(m, "Destination")
      .def(py::init<std::string, int, std::uint64_t, std::uint64_t>(), py::arg("name"), py::arg("rank"),
           py::arg("max_calls"), py::arg("max_bytes"))
      .def_readonly("name", &Destination::name)
      .def_readonly("rank", &Destination::rank)
      .def_readonly("max_calls", &Destination::max_calls)
      .def_readonly("max_bytes", &Destination::max_bytes)
      .def_property_readonly("in_flight", [](const Destination& self) { return self.counts().in_flight; })
      .def_property(
          "waiting", [](const Destination& self) { return self.waiting.load(); },
          [](Destination& self, std::uint64_t waiting) { self.waiting = waiting; })
      .def_property(
          "is_awaited", [](const Destination& self) { return self.is_awaited.load(); },
          [](Destination& self, bool is_awaited) { self.is_awaited = is_awaited; })
      .def("try_admit", &Destination::try_admit, py::arg("size"))
      .def("take_room", &Destination::take_room, py::arg("size"))
      .def("give_back", &Destination::give_back, py::arg("size"))
      .def("finish", finish, py::arg("call"), py::arg("received"), py::arg("failed"))
      .def("counts",
           [](const Destination& self) {
             const auto& [calls, failed, in_flight, bytes_in_flight, sent, received] = self.counts();
             py::dict counts;
             counts["calls"] = calls;
             counts["failed"] = failed;
             counts["in_flight"] = in_flight;
             counts["bytes_in_flight"] = bytes_in_flight;
             counts["bytes_sent"] = sent;
             counts["bytes_received"] = received;
             return counts;
           })
      .def_property_readonly("latencies", &Destination::latencies);

  py::class_<Channel, std::shared_ptr<Channel>>(m, "Channel")
      .def(py::init([](const std::shared_ptr<Agent>& agent, py::object destination, unsigned char number,
                       std::string name, py::object of_end, py::object of_reply, py::object of_engine) {
             return std::make_shared<Channel>(
                 agent, std::move(destination), number, std::move(name),
                 Channel::Errors{Held(std::move(of_end)), Held(std::move(of_reply)), Held(std::move(of_engine))});
           }),
           py::arg("agent"), py::arg("destination"), py::arg("number"), py::arg("name"), py::kw_only(),
           py::arg("error_of_end"), py::arg("error_of_reply"), py::arg("error_of_engine"))
      .def("send", send_message, py::arg("body"), py::arg("tensors"), py::arg("seconds"), py::arg("listener"));

  m.attr("MAGIC") = py::bytes(magic.data(), magic.size());
  m.def("channel_header", [](unsigned char number) { return py::bytes(header_of(number)); }, py::arg("number"));
  m.def("listening_address", &rpc::TensorPipeAgent::guessAddress);
  m.def("in_distributed_autograd",
        [] { return torch::distributed::autograd::DistAutogradContainer::getInstance().hasValidContext(); });
  m.def("record_rrefs", [] { rpc::RRefContext::getInstance().recordThreadLocalPendingRRefs(); });
  m.def("forget_rrefs", [] {
    const GilRelease without_gil;  // references that go send messages
    rpc::RRefContext::getInstance().clearRecordedPendingRRefsOnError();
  });
  m.def("forget_autograd_rank", forget_autograd_rank);
  m.def("renew_references", [] {
    const GilRelease without_gil;
    renew_references();
  });
  m.def("has_value", [](const rpc::PyRRef& rref) { return owned(rref)->getFuture()->completed(); }, py::arg("rref"));
  m.def("set_value", set_value, py::arg("rref"), py::arg("value"));
  m.def("when_owned", when_owned, py::arg("rref"), py::arg("fn"));
  m.def("when_rrefs_are_confirmed", when_rrefs_are_confirmed, py::arg("fn"));

  m.def("receive_into", receive_into_capsule, py::arg("allocator"), py::arg("smallest"), py::arg("largest"));
  m.def("memory", memory, py::arg("data"));
  m.def("expect_memory", expect_memory, py::arg("tensor"));
  m.def("expect_storage", expect_storage, py::arg("tensor"));
  m.def("sendable", sendable, py::arg("tensor"));
  store::bind(m);
  store::client::bind(m);
}

}  // namespace rpc_ext
