// The c10d backend "cudafuture": it gives each collective to the backend of the tensors' device, and returns Works that
// have CUDAFutures.
//
//     dist.all_reduce(t)  ──►  FutureBackend::allreduce  ──►  ProcessGroupGloo::allreduce
//                                  │ route: by device, and by the callback that issues        │ Work
//                                  ◄── FutureWork(Work, name, number, value) ◄────────────────┘
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "work.h"

namespace cudafuture::c10d_backend {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

// The arguments of a collective, as cudafuture.distributed names them.
struct Arguments {
  pybind11::tuple tensors;
  pybind11::dict options;
};

// One end of a message.
struct MessageEnd {
  const at::Tensor& tensor;
  int peer;  // the rank of the other end in the group, or kAnyRank
  int tag;
};

// Every virtual function of Backend is forwarded (tests/distributed/test_backend_forwards.py compares them with torch's
// header). Functions without a tensor go to the principal backend: that of the bound device, else that of an
// accelerator, else the first. What concerns the whole group goes to all of them.
class FutureBackend final : public c10d::Backend {
 public:
  struct Inner {
    c10::DeviceType device;
    BackendPtr backend;            // one backend may carry several types of devices
    bool has_issue_order = false;  // over NCCL, several communicators need one order of execution on the device
  };

  // `is_owner`: shutdown() and abort() end the wrapped backends too. Otherwise their process group does. `name`: of the
  // group.
  FutureBackend(int rank, int size, std::vector<Inner> inner, bool is_owner, std::string name);

  // The wrapped backend of a type of devices. Throws if there is none.
  const Inner& of(c10::DeviceType device) const;
  std::uint64_t number() const noexcept { return identity_->number; }
  // The principal backend.
  const BackendPtr& wrapped() const;

  // CUDAFUTURE_DEBUG=order: Python compares each operation with those of the other ranks.
  static std::atomic<bool> compares_order;

  // ---- collectives
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  // ---- point to point
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // ---- operations that start together. Their Works are those of the wrapped backend; the last one has a future
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // ---- new groups from this one
  bool supportsSplitting() const override { return principal().supportsSplitting(); }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& options) override;
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& options,
                   const int& rank, const int& size) override;
  bool supportsShrinking() const override { return principal().supportsShrinking(); }
  BackendPtr shrink(const std::vector<std::int64_t>& without, int flags,
                    const c10::intrusive_ptr<Options>& options) override;

  // ---- the group
  const std::string getBackendName() const override { return "cudafuture"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return principal().getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setGroupUid(const std::string& name) override;
  void setSequenceNumberForGroup() override;
  std::uint64_t getSequenceNumberForGroup() override { return principal().getSequenceNumberForGroup(); }
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { principal().waitForPendingWorks(); }
  void enableCollectivesTiming() override;
  bool supportsTimeEstimation() const override { return principal().supportsTimeEstimation(); }

  // ---- memory
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return principal().getMemAllocator(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return principal().supportsTensorAlloc(device); }
  // The next three are virtual in torch 2.13, and called by nothing before.
  void suspend();
  void resume();
  std::unordered_map<std::string, std::uint64_t> getMemoryStats();

 private:
  // How the backend pairs the operations of ranks: by their order on the group, or by peer and tag.
  enum class Pairing { by_order, by_peer };

  // Calls a wrapped backend and returns its Work with a future. `value`, `stream`: as in IssuedOperation. `about`: a
  // function that returns the Arguments of a collective, with the GIL; or the MessageEnd.
  template <class Call, class About>
  WorkPtr issue(const char* name, c10::DeviceType device, c10::IValue value, std::optional<c10::Stream> stream,
                Call call, const About& about);
  template <class Call, class About>
  WorkPtr issue(const char* name, const at::Tensor& tensor, c10::IValue value, Call call, const About& about);
  // Calls `issue_now` in Python, which compares the operation.
  template <class About>
  [[gnu::cold, gnu::noinline]] WorkPtr compare(const char* name, c10::DeviceType device,
                                               const std::function<WorkPtr()>& issue_now, const About& about);
  template <class Call>
  void for_each(Call call) const;
  template <class Make>
  BackendPtr made_of_inner(Make make);

  bool is_coalescing_here() const noexcept { return coalescing_.load() == std::this_thread::get_id(); }
  c10d::Backend& principal() const { return *wrapped(); }
  // The backend on which this thread issues: that of the device, or, in a callback, that of the callback's side group.
  BackendPtr route(const char* name, const Inner& inner, Pairing pairing);
  [[gnu::cold, gnu::noinline]] BackendPtr route_in_callback(const char* name, const Inner& inner);
  // The place of the group's operations, which Python makes at the first one.
  OperationPlace& place() {
    OperationPlace* const known = place_.load(std::memory_order_acquire);
    return known != nullptr ? *known : find_place();
  }
  [[gnu::cold, gnu::noinline]] OperationPlace& find_place();
  // Gives the wrapped backends what torch has set in fields of this object.
  void carry();

  std::vector<Inner> inner_;  // constant from the constructor on
  const bool is_owner_;
  std::shared_ptr<const GroupIdentity> identity_;
  std::atomic<std::uint64_t> issued_{0};
  std::atomic<OperationPlace*> place_{nullptr};  // never freed
  std::atomic<std::int64_t> collectives_{0};     // issued on this group itself
  // The result of the last split(), and its arguments.
  c10::weak_intrusive_ptr<c10d::Backend> last_split_{BackendPtr()};
  c10::weak_intrusive_ptr<c10d::Store> last_split_store_{c10::intrusive_ptr<c10d::Store>()};
  std::vector<int> last_split_ranks_;
  // The thread between startCoalescing() and endCoalescing(). As in the wrapped backends, there is one at a time.
  std::atomic<std::thread::id> coalescing_{std::thread::id()};
  std::vector<WorkPtr> coalesced_;  // of backends that do not coalesce
  c10::List<at::Tensor> coalesced_outputs_;
};

void bind_backend(pybind11::module_& m);

}  // namespace cudafuture::c10d_backend
