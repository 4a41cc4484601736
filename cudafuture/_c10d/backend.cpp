#include "backend.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "api/order.h"

namespace cudafuture::c10d_backend {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;

std::atomic<std::uint64_t> next_number{0};

std::optional<c10::Stream> current_stream(const at::Tensor& tensor) {
  if (tensor.is_cpu() || !c10::impl::hasDeviceGuardImpl(tensor.device().type())) return std::nullopt;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

c10::IValue list_of(const TensorLists& lists) {
  c10::List<c10::List<at::Tensor>> all;
  for (const Tensors& tensors : lists) all.push_back(c10::List<at::Tensor>(tensors));
  return all;
}

// The value of an operation whose functions in torch take one tensor, although the backend gets a list.
c10::IValue single(const Tensors& tensors) {
  return tensors.size() == 1 ? c10::IValue(tensors.front()) : c10::IValue(tensors);
}

c10::IValue single(const TensorLists& lists) { return lists.size() == 1 ? c10::IValue(lists.front()) : list_of(lists); }

// The tensors that a collective was given, in Python.
template <class... Tensor>
py::tuple given(const Tensor&... tensors) {
  return py::make_tuple(torch::jit::toPyObject(c10::IValue(tensors))...);
}

// No tensors: one that is undefined, which names no device.
const at::Tensor& any_of(const Tensors& first, const Tensors& second) {
  static const at::Tensor none;
  const Tensors& tensors = first.empty() ? second : first;
  return tensors.empty() ? none : tensors.front();
}

const at::Tensor& any_of(const Tensors& tensors) { return any_of(tensors, tensors); }

}  // namespace

std::atomic<bool> FutureBackend::compares_order{false};

FutureBackend::FutureBackend(int rank, int size, std::vector<Inner> inner, bool is_owner, std::string name)
    : Backend(rank, size),
      inner_(std::move(inner)),
      is_owner_(is_owner),
      identity_(std::make_shared<const GroupIdentity>(GroupIdentity{std::move(name), next_number++})) {
  TORCH_CHECK_VALUE(!inner_.empty(), "the backend cudafuture needs a backend to wrap");
  for (Inner& one : inner_) one.has_issue_order = one.backend->getBackendName() == "nccl";
  pg_uid_ = identity_->name;
  pg_desc_ = inner_.front().backend->getGroupDesc();
}

const FutureBackend::Inner& FutureBackend::of(c10::DeviceType device) const {
  for (const Inner& one : inner_) {
    if (one.device == device) return one;
  }
  TORCH_CHECK(false, "No backend type associated with device type ", c10::DeviceTypeName(device, true),
              ": the backend cudafuture of group '", identity_->name,
              "' wraps none for it; name one in BackendOptions(", c10::DeviceTypeName(device, true), "=...)");
}

const BackendPtr& FutureBackend::wrapped() const {
  if (bound_device_id_) {
    for (const Inner& one : inner_) {
      if (one.device == bound_device_id_->type()) return one.backend;
    }
  }
  const auto accelerator =
      std::find_if(inner_.begin(), inner_.end(), [](const Inner& one) { return one.device != c10::DeviceType::CPU; });
  return accelerator == inner_.end() ? inner_.front().backend : accelerator->backend;
}

// Calls a function once with each wrapped backend.
template <class Call>
void FutureBackend::for_each(Call call) const {
  for (auto one = inner_.begin(); one != inner_.end(); ++one) {
    const auto is_same = [&](const Inner& other) { return other.backend == one->backend; };
    if (std::none_of(inner_.begin(), one, is_same)) call(*one->backend);
  }
}

void FutureBackend::carry() {
  for_each([this](c10d::Backend& backend) {
    if (bound_device_id_ != backend.getBoundDeviceId()) backend.setBoundDeviceId(bound_device_id_);
    if (pg_desc_ != backend.getGroupDesc()) backend.setGroupDesc(pg_desc_);
    [](c10d::Backend& own, auto& one) {  // from torch 2.13 on
      if constexpr (requires { one.setUsePgForSymmMemRendezvous(true); }) {
        one.setUsePgForSymmMemRendezvous(static_cast<decltype(one)>(own).getUsePgForSymmMemRendezvous());
      }
    }(*this, backend);
  });
}

BackendPtr FutureBackend::route(const char* name, const Inner& inner, Pairing pairing) {
  if (is_owner_) carry();
  const bool may_issue = is_coalescing_here()  // startCoalescing() has waited
                         || (pairing == Pairing::by_peer && !inner.has_issue_order) ||
                         (!api::is_in_callback() && (!inner.has_issue_order || api::is_issue_turn()));
  if (may_issue) [[likely]]
    return inner.backend;
  return route_in_callback(name, inner);
}

BackendPtr FutureBackend::route_in_callback(const char* name, const Inner& inner) {
  const py::gil_scoped_acquire inside;
  const py::object other = py::module_::import("cudafuture.distributed._backend")
                               .attr("route")(identity_->name, identity_->number,
                                              c10::DeviceTypeName(inner.device, true), name, inner.has_issue_order);
  return other.is_none() ? inner.backend : other.cast<BackendPtr>();
}

OperationPlace& FutureBackend::find_place() {
  const py::gil_scoped_acquire inside;
  const py::capsule place = py::module_::import("cudafuture.distributed._backend")
                                .attr("place_of_works")(identity_->name, identity_->number, is_owner_);
  place_.store(place.get_pointer<OperationPlace>(), std::memory_order_release);
  return *place_;
}

// Hot and flat: other threads run while a collective is waited for, and each page of cold code then costs a miss.
template <class Call, class About>
[[gnu::hot, gnu::flatten]] WorkPtr FutureBackend::issue(const char* name, c10::DeviceType device, c10::IValue value,
                                                        std::optional<c10::Stream> stream, Call call,
                                                        const About& about) {
  constexpr bool is_message = std::is_same_v<About, MessageEnd>;
  const auto issue_now = [&]() -> WorkPtr {
    const Inner& inner = of(device);
    const BackendPtr backend = route(name, inner, is_message ? Pairing::by_peer : Pairing::by_order);
    const std::uint64_t sequence = issued_.fetch_add(1, std::memory_order_relaxed);
    std::int64_t number = api::kNone;
    OperationPlace& place = this->place();
    if (!is_message && backend == inner.backend) [[likely]] {
      number = collectives_.fetch_add(1, std::memory_order_relaxed);
      api::note_issued(place, name, number);
    }
    WorkPtr work;
    try {
      work = call(*backend);
    } catch (...) {
      if (number != api::kNone) {  // it was not issued
        collectives_.fetch_sub(1, std::memory_order_relaxed);
        api::note_issued(place, name, number - 1);
      }
      throw;
    }
    if (work == nullptr || is_coalescing_here()) [[unlikely]] {
      if (number != api::kNone) api::note_ended(place);  // its end is not seen
      if (work != nullptr && !backend->supportsCoalescing()) coalesced_.push_back(work);
      return work;
    }
    IssuedOperation operation{name, sequence, identity_, std::move(value), stream, &place, number};
    operation.blocks_host = !stream || !inner.has_issue_order;
    if constexpr (is_message) {
      if (!inner.has_issue_order) work = c10::make_intrusive<MessageWork>(work);
      operation.peer = about.peer;
      if (about.tensor.layout() == c10::kStrided) operation.bytes = static_cast<std::int64_t>(about.tensor.nbytes());
    }
    return c10::make_intrusive<FutureWork>(std::move(work), std::move(operation));
  };
  if (!compares_order.load(std::memory_order_relaxed) || is_coalescing_here()) [[likely]] {
    WorkPtr work = issue_now();
    // A message without a future would need a thread of its own.
    if (api::is_traced() && (!is_message || of(device).has_issue_order)) [[unlikely]]
      follow_for_trace(work);
    return work;
  }
  return compare(name, device, issue_now, about);
}

template <class Call, class About>
[[gnu::hot, gnu::flatten]] WorkPtr FutureBackend::issue(const char* name, const at::Tensor& tensor, c10::IValue value,
                                                        Call call, const About& about) {
  if (is_coalescing_here() && value.isTensor()) coalesced_outputs_.push_back(value.toTensor());
  if (!tensor.defined()) call(principal());  // throws the wrapped backend's error
  TORCH_CHECK(tensor.defined(), name, " was given no tensor");
  return issue(name, tensor.device().type(), std::move(value), current_stream(tensor), std::move(call), about);
}

template <class About>
WorkPtr FutureBackend::compare(const char* name, c10::DeviceType device, const std::function<WorkPtr()>& issue_now,
                               const About& about) {
  const py::gil_scoped_acquire inside;
  const py::module_ backend = py::module_::import("cudafuture.distributed._backend");
  const py::cpp_function call([&]() -> WorkPtr {
    const py::gil_scoped_release outside;
    return issue_now();
  });
  py::object work;
  if constexpr (std::is_same_v<About, MessageEnd>) {
    work = backend.attr("compare_message")(call, identity_->name, identity_->number, name, about.tensor, about.peer,
                                           about.tag);
  } else {
    const Arguments given = about();
    work = backend.attr("compare")(call, identity_->name, identity_->number, c10::DeviceTypeName(device, true), name,
                                   given.tensors, given.options);
  }
  return work.cast<WorkPtr>();
}

// ---- collectives

WorkPtr FutureBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return issue(
      "broadcast", any_of(tensors), single(tensors),
      [&](c10d::Backend& backend) { return backend.broadcast(tensors, options); },
      [&] { return Arguments{given(single(tensors)), py::dict("group_src"_a = options.rootRank)}; });
}

WorkPtr FutureBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue(
      "all_reduce", any_of(tensors), single(tensors),
      [&](c10d::Backend& backend) { return backend.allreduce(tensors, options); },
      [&] { return Arguments{given(single(tensors)), py::dict("op"_a = options.reduceOp)}; });
}

WorkPtr FutureBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue(
      "all_reduce", any_of(tensors), single(tensors),
      [&](c10d::Backend& backend) { return backend.allreduce_sparse(tensors, options); },
      [&] { return Arguments{given(single(tensors)), py::dict("op"_a = options.reduceOp)}; });
}

WorkPtr FutureBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return issue(
      "all_reduce_coalesced", any_of(tensors), tensors,
      [&](c10d::Backend& backend) { return backend.allreduce_coalesced(tensors, options); },
      [&] { return Arguments{given(tensors), py::dict("op"_a = options.reduceOp)}; });
}

WorkPtr FutureBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const bool has_output = options.rootRank == rank_;
  return issue(
      "reduce", any_of(tensors), has_output ? single(tensors) : c10::IValue(),
      [&](c10d::Backend& backend) { return backend.reduce(tensors, options); },
      [&] {
        return Arguments{given(single(tensors)), py::dict("group_dst"_a = options.rootRank, "op"_a = options.reduceOp)};
      });
}

WorkPtr FutureBackend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return issue(
      "all_gather", any_of(inputs), single(outputs),
      [&](c10d::Backend& backend) { return backend.allgather(outputs, inputs, options); },
      [&] { return Arguments{given(single(outputs), single(inputs)), {}}; });
}

WorkPtr FutureBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return issue(
      "all_gather_into_tensor", input, output,
      [&](c10d::Backend& backend) { return backend._allgather_base(output, input, options); },
      [&] { return Arguments{given(output, input), {}}; });
}

WorkPtr FutureBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) {
  return issue(
      "all_gather_coalesced", any_of(inputs), list_of(outputs),
      [&](c10d::Backend& backend) { return backend.allgather_coalesced(outputs, inputs, options); },
      [&] { return Arguments{given(list_of(outputs), inputs), {}}; });
}

WorkPtr FutureBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& options) {
  return issue(
      "all_gather_into_tensor", any_of(inputs, outputs), outputs,
      [&](c10d::Backend& backend) { return backend.allgather_into_tensor_coalesced(outputs, inputs, options); },
      [&] { return Arguments{given(single(outputs), single(inputs)), {}}; });
}

WorkPtr FutureBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const c10::IValue output = outputs.empty() ? c10::IValue() : c10::IValue(outputs.front());
  return issue(
      "gather", any_of(inputs), output,
      [&](c10d::Backend& backend) { return backend.gather(outputs, inputs, options); },
      [&] { return Arguments{given(single(inputs), output), py::dict("group_dst"_a = options.rootRank)}; });
}

WorkPtr FutureBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return issue(
      "scatter", any_of(outputs), single(outputs),
      [&](c10d::Backend& backend) { return backend.scatter(outputs, inputs, options); },
      [&] {
        const c10::IValue input = inputs.empty() ? c10::IValue() : c10::IValue(inputs.front());
        return Arguments{given(single(outputs), input), py::dict("group_src"_a = options.rootRank)};
      });
}

WorkPtr FutureBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ReduceScatterOptions& options) {
  return issue(
      "reduce_scatter", any_of(outputs), single(outputs),
      [&](c10d::Backend& backend) { return backend.reduce_scatter(outputs, inputs, options); },
      [&] { return Arguments{given(single(outputs), single(inputs)), py::dict("op"_a = options.reduceOp)}; });
}

WorkPtr FutureBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& options) {
  return issue(
      "reduce_scatter_tensor", output, output,
      [&](c10d::Backend& backend) { return backend._reduce_scatter_base(output, input, options); },
      [&] { return Arguments{given(output, input), py::dict("op"_a = options.reduceOp)}; });
}

WorkPtr FutureBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  return issue(
      "reduce_scatter_tensor", any_of(outputs, inputs), outputs,
      [&](c10d::Backend& backend) { return backend.reduce_scatter_tensor_coalesced(outputs, inputs, options); },
      [&] { return Arguments{given(single(outputs), single(inputs)), py::dict("op"_a = options.reduceOp)}; });
}

WorkPtr FutureBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                                     std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  return issue(
      "all_to_all_single", input, output,
      [&](c10d::Backend& backend) { return backend.alltoall_base(output, input, output_sizes, input_sizes, options); },
      [&] {
        return Arguments{given(output, input),
                         py::dict("output_split_sizes"_a = output_sizes, "input_split_sizes"_a = input_sizes)};
      });
}

WorkPtr FutureBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return issue(
      "all_to_all", any_of(outputs, inputs), outputs,
      [&](c10d::Backend& backend) { return backend.alltoall(outputs, inputs, options); },
      [&] { return Arguments{given(outputs, inputs), {}}; });
}

// torch chooses a device for a barrier, but does not say which one. It is the bound device, else the host if the group
// has a backend for it. A barrier that names devices is for an accelerator.
WorkPtr FutureBackend::barrier(const c10d::BarrierOptions& options) {
  c10::DeviceType device = inner_.front().device;
  for (const Inner& one : inner_) {
    const bool is_host = one.device == c10::DeviceType::CPU;
    if (bound_device_id_ ? one.device == bound_device_id_->type() : is_host == options.device_ids.empty()) {
      device = one.device;
      break;
    }
  }
  return issue(
      "barrier", device, {}, std::nullopt, [&](c10d::Backend& backend) { return backend.barrier(options); },
      [] { return Arguments{py::tuple(), {}}; });
}

void FutureBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const BackendPtr backend = route("monitored_barrier", of(c10::DeviceType::CPU), Pairing::by_order);
  const api::OperationWait shown({"monitored_barrier", &place()}, false);
  backend->monitoredBarrier(options, wait_all_ranks);
}

// ---- point to point

WorkPtr FutureBackend::send(Tensors& tensors, int to, int tag) {
  return issue(
      "send", any_of(tensors), {}, [&](c10d::Backend& backend) { return backend.send(tensors, to, tag); },
      MessageEnd{any_of(tensors), to, tag});
}

WorkPtr FutureBackend::recv(Tensors& tensors, int from, int tag) {
  return issue(
      "recv", any_of(tensors), single(tensors),
      [&](c10d::Backend& backend) { return backend.recv(tensors, from, tag); }, MessageEnd{any_of(tensors), from, tag});
}

WorkPtr FutureBackend::recvAnysource(Tensors& tensors, int tag) {
  return issue(
      "recv", any_of(tensors), single(tensors),
      [&](c10d::Backend& backend) { return backend.recvAnysource(tensors, tag); },
      MessageEnd{any_of(tensors), kAnyRank, tag});
}

// ---- coalescing

bool FutureBackend::supportsCoalescing() const {
  bool supports = false;
  for_each([&](c10d::Backend& backend) { supports = supports || backend.supportsCoalescing(); });
  return supports;
}

void FutureBackend::startCoalescing() {
  TORCH_CHECK(supportsCoalescing(), "no backend that the backend cudafuture of group '", identity_->name,
              "' wraps can coalesce operations");
  for (const Inner& one : inner_) {
    if (one.backend->supportsCoalescing()) route("coalesced", one, Pairing::by_peer);
  }
  for_each([](c10d::Backend& backend) {
    if (backend.supportsCoalescing()) backend.startCoalescing();
  });
  coalescing_ = std::this_thread::get_id();
}

WorkPtr FutureBackend::endCoalescing() {
  coalescing_ = std::thread::id();
  std::vector<WorkPtr> works = std::exchange(coalesced_, {});
  c10::List<at::Tensor> outputs = std::exchange(coalesced_outputs_, c10::List<at::Tensor>());
  for_each([&](c10d::Backend& backend) {
    if (!backend.supportsCoalescing()) return;
    if (WorkPtr work = backend.endCoalescing()) works.push_back(std::move(work));
  });
  if (works.empty()) return nullptr;
  WorkPtr work = works.front();
  if (works.size() > 1) work = c10::make_intrusive<WorkList>(std::move(works));
  std::optional<c10::Stream> stream;
  if (!outputs.empty()) stream = current_stream(outputs.get(0));
  return c10::make_intrusive<FutureWork>(
      std::move(work), IssuedOperation{"coalesced", issued_++, identity_, std::move(outputs), stream, &place()});
}

// ---- new groups

namespace {

c10::intrusive_ptr<c10d::Backend::Options> options_of(c10d::Backend& backend,
                                                      const c10::intrusive_ptr<c10d::Backend::Options>& given) {
  return given != nullptr && given->backend == backend.getBackendName() ? given : backend.getBackendOptions();
}

// The keys of one wrapped backend, as torch itself separates those of a group's backends.
c10::intrusive_ptr<c10d::Store> store_of(c10::DeviceType device, const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(c10::DeviceTypeName(device, true) + "/", store);
}

}  // namespace

template <class Make>
BackendPtr FutureBackend::made_of_inner(Make make) {
  carry();
  std::vector<Inner> inner;
  for (const Inner& one : inner_) {
    const auto is_same = [&](const Inner& other) { return other.backend == one.backend; };
    const auto like = static_cast<std::size_t>(std::find_if(inner_.begin(), inner_.end(), is_same) - inner_.begin());
    inner.push_back({one.device, like < inner.size() ? inner[like].backend : make(one)});
  }
  if (std::any_of(inner.begin(), inner.end(), [](const Inner& one) { return one.backend == nullptr; })) return nullptr;
  const c10d::Backend& first = *inner.front().backend;
  return c10::make_intrusive<FutureBackend>(first.getRank(), first.getSize(), std::move(inner), true, identity_->name);
}

BackendPtr FutureBackend::split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                const c10::intrusive_ptr<Options>& options) {
  // torch asks once for each type of devices, with one store: a second set of connections would meet the keys of the
  // first one there, and hang.
  BackendPtr known = last_split_.lock();
  if (known != nullptr && last_split_store_.lock() == store && last_split_ranks_ == ranks) return known;
  // The parts of one split have the same name, and so the same store: members would find each other's addresses.
  std::string part = "ranks";
  for (const int rank : ranks) part.append("_").append(std::to_string(rank));
  const auto own = c10::make_intrusive<c10d::PrefixStore>(part + "/", store);
  BackendPtr made = made_of_inner([&](const Inner& one) {
    return one.backend->split(store_of(one.device, own), ranks, options_of(*one.backend, options));
  });
  if (made == nullptr) return made;
  last_split_ = c10::weak_intrusive_ptr<c10d::Backend>(made);
  last_split_store_ = c10::weak_intrusive_ptr<c10d::Store>(store);
  last_split_ranks_ = ranks;
  return made;
}

BackendPtr FutureBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                const c10::intrusive_ptr<Options>& options, const int& rank, const int& size) {
  return made_of_inner([&](const Inner& one) {
    return one.backend->merge(store_of(one.device, store), options_of(*one.backend, options), rank, size);
  });
}

BackendPtr FutureBackend::shrink(const std::vector<std::int64_t>& without, int flags,
                                 const c10::intrusive_ptr<Options>& options) {
  return made_of_inner([&](const Inner& one) { return one.backend->shrink(without, flags, options); });
}

// ---- the group

void FutureBackend::setTimeout(std::chrono::milliseconds timeout) {
  std::exception_ptr refusal;  // of a backend that has no such method; the others have the timeout all the same
  bool is_set = false;
  for_each([&](c10d::Backend& backend) {
    try {
      backend.setTimeout(timeout);
      is_set = true;
    } catch (const c10::Error&) {
      refusal = std::current_exception();
    }
  });
  if (!is_set) std::rethrow_exception(refusal);
}

void FutureBackend::setGroupUid(const std::string& name) {
  Backend::setGroupUid(name);
  identity_ = std::make_shared<const GroupIdentity>(GroupIdentity{name, identity_->number});
  if (!is_owner_) return;
  carry();
  for_each([&](c10d::Backend& backend) { backend.setGroupUid(name); });
}

void FutureBackend::setSequenceNumberForGroup() {
  for_each([](c10d::Backend& backend) { backend.setSequenceNumberForGroup(); });
}

void FutureBackend::eagerConnectSingleDevice(at::Device device) {
  carry();
  of(device.type()).backend->eagerConnectSingleDevice(device);
}

c10d::ErrorType FutureBackend::getError() {
  c10d::ErrorType first = c10d::ErrorType::SUCCESS;
  bool has_any = false;
  for_each([&](c10d::Backend& backend) {
    try {
      const c10d::ErrorType error = backend.getError();
      has_any = true;
      if (first == c10d::ErrorType::SUCCESS) first = error;
    } catch (const c10::Error&) {  // it reports none
    }
  });
  return has_any ? first : Backend::getError();
}

void FutureBackend::abort() {
  if (is_owner_) for_each([](c10d::Backend& backend) { backend.abort(); });
}

void FutureBackend::shutdown() {
  if (is_owner_) for_each([](c10d::Backend& backend) { backend.shutdown(); });
}

void FutureBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  auto copy = hook;
  principal().registerOnCompletionHook(std::move(copy));  // throws if it has no such hooks
  onCompletionHook_ = std::move(hook);                    // hasHooks() looks at this field
}

void FutureBackend::enableCollectivesTiming() {
  for_each([](c10d::Backend& backend) {
    if (backend.supportsTimeEstimation() || backend.getBackendName() == "nccl") backend.enableCollectivesTiming();
  });
}

// ---- memory

at::Tensor FutureBackend::allocateTensor(long size, at::TensorOptions options) {
  return of(options.device().type()).backend->allocateTensor(size, options);
}

void FutureBackend::suspend() {
  [](auto& backend) {
    if constexpr (requires { backend.suspend(); }) backend.suspend();
  }(principal());
}

void FutureBackend::resume() {
  [](auto& backend) {
    if constexpr (requires { backend.resume(); }) backend.resume();
  }(principal());
}

std::unordered_map<std::string, std::uint64_t> FutureBackend::getMemoryStats() {
  return [](auto& backend) -> std::unordered_map<std::string, std::uint64_t> {
    if constexpr (requires { backend.getMemoryStats(); }) {
      return backend.getMemoryStats();
    } else {
      return {};
    }
  }(principal());
}

// ---- Python

void bind_backend(py::module_& m) {
  const py::module_ c10d = py::module_::import("torch._C._distributed_c10d");
  py::class_<FutureBackend, c10d::Backend, Holder<FutureBackend>> backend(m, "FutureBackend", R"(
The c10d backend "cudafuture" of one process group: it wraps the backends that carry the tensors.

Methods that only a wrapped backend has, such as those of ProcessGroupNCCL, are found on it.
)");
  backend
      .def(py::init([](int rank, int size, const std::vector<std::pair<std::string, BackendPtr>>& inner, bool is_owner,
                       std::string name) {
             std::vector<FutureBackend::Inner> all;
             all.reserve(inner.size());
             for (const auto& [device, one] : inner) all.push_back({c10::Device(device).type(), one});
             return c10::make_intrusive<FutureBackend>(rank, size, std::move(all), is_owner, std::move(name));
           }),
           py::arg("rank"), py::arg("size"), py::arg("inner"), py::arg("is_owner"), py::arg("name"))
      .def(
          "inner",
          [](const FutureBackend& self, const std::string& device) {
            return self.of(c10::Device(device).type()).backend;
          },
          py::arg("device"), "Return the wrapped backend of a type of devices; RuntimeError: there is none.")
      .def_property_readonly("_number", &FutureBackend::number)
      .def_static("_compare_order", [](bool wanted) { FutureBackend::compares_order = wanted; })
      .def("__getattr__", [](const FutureBackend& self, const std::string& name) -> py::object {
        const py::object inner = py::cast(self.wrapped());
        return inner.attr(name.c_str());
      });

  // torch gives our backend to NCCL's options as the one to split from. They take the NCCL backend that it wraps.
  if (!py::hasattr(c10d, "ProcessGroupNCCL")) return;
  static PyTypeObject* const nccl = reinterpret_cast<PyTypeObject*>(c10d.attr("ProcessGroupNCCL").ptr());
  py::detail::get_type_info(nccl)->implicit_conversions.push_back([](PyObject* object, PyTypeObject*) -> PyObject* {
    if (!py::isinstance<FutureBackend>(object)) return nullptr;
    const py::object inner = py::cast(py::handle(object).cast<FutureBackend&>().wrapped());
    return PyObject_TypeCheck(inner.ptr(), nccl) != 0 ? inner.inc_ref().ptr() : nullptr;
  });
}

}  // namespace cudafuture::c10d_backend
