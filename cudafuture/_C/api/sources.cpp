// Sources of writes: Python's tensors, whose bytes are read on any thread.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <deque>
#include <utility>

#include "api/implementation.h"
#include "api/tensors.h"
#include "api/thread.h"
#include "bind/future.h"
#include "bind/tensors.h"
#include "core/pinned_memory.h"
#include "core/process.h"
#include "core/watcher.h"
#include "io/device.h"
#include "io/watch.h"

namespace cudafuture::api {
namespace {

using io::Direction;

at::TensorOptions bytes_on_host() { return at::TensorOptions(at::kByte).device(at::kCPU); }

at::Tensor new_bytes(std::uint64_t size) { return at::empty({static_cast<std::int64_t>(size)}, bytes_on_host()); }

class Described : public Source {
 public:
  explicit Described(const at::Tensor& tensor)
      : dtype_(tensor.scalar_type()), sizes_(tensor.sizes().vec()), nbytes_(tensor.nbytes()) {}

  c10::ScalarType dtype() const noexcept override { return dtype_; }
  const std::vector<std::int64_t>& sizes() const noexcept override { return sizes_; }
  std::uint64_t nbytes() const noexcept override { return nbytes_; }

 private:
  const c10::ScalarType dtype_;
  const std::vector<std::int64_t> sizes_;
  const std::uint64_t nbytes_;
};

class HostSource final : public Described, public std::enable_shared_from_this<HostSource> {
 public:
  explicit HostSource(bind::CheckedTensor&& checked)
      : Described(checked.tensor),
        owner_(bind::foreign(std::move(checked.owner))),
        memory_(checked.tensor, Direction::write) {}

  bool is_on_device() const noexcept override { return false; }

  void gather(std::uint64_t at, std::uint64_t size, std::byte* into) const override {
    expect_memory();
    if (size != 0) memory_.memory().gather(at, size, into);
  }

  at::Tensor part(std::uint64_t at, std::uint64_t size) override {
    expect_memory();
    iovec piece;
    if (size != 0 && memory_.memory().pieces(at, size, &piece, 1) == 1) {
      return at::from_blob(
          piece.iov_base, {static_cast<std::int64_t>(size)}, [self = shared_from_this()](void*) {}, bytes_on_host());
    }
    at::Tensor bytes = new_bytes(size);
    gather(at, size, static_cast<std::byte*>(bytes.mutable_data_ptr()));
    return bytes;
  }

  void copy_to_host(std::uint64_t at, std::uint64_t size, Copied copied) override {
    at::Tensor bytes;
    std::exception_ptr error;
    try {
      bytes = part(at, size);
    } catch (...) {
      error = std::current_exception();
    }
    copied(std::move(bytes), std::move(error));
  }

 private:
  void expect_memory() const {
    if (const auto fault = memory_.fault()) throw value_failure(*fault);
  }

  const Foreign owner_;
  const bind::HostMemory memory_;
};

// Calls a function with the error of a device, once the work behind a future has finished. The future is done.
template <class Function>
class WhenFinished final : public Continuation {
 public:
  WhenFinished(const FuturePtr& done, Function function) : done_(done), function_(std::move(function)) {
    parent = done;
  }

  void run(Future& done) noexcept override { leave(done.late_error()); }
  void abandon() noexcept override { leave(io::synchronize(*done_)); }

 private:
  void leave(std::exception_ptr error) noexcept {
    function_(std::move(error));
    delete this;
  }

  const FuturePtr done_;
  Function function_;
};

template <class Function>
void when_finished(const FuturePtr& done, Function function) {
  auto* const finished = new WhenFinished<Function>(done, std::move(function));
  if (!Watcher::get().try_watch(finished)) finished->abandon();
}

// The tensors on devices of one call. Their owners are dropped last.
struct OnDevices {
  Foreign keep;
  std::shared_ptr<io::DeviceSide> side;
};

class SourceOnDevice final : public Described {
 public:
  SourceOnDevice(const at::Tensor& tensor, std::shared_ptr<OnDevices> devices, io::Memory&& memory)
      : Described(tensor), device_(std::make_shared<Bytes>(Bytes{std::move(devices), std::move(memory)})) {}

  bool is_on_device() const noexcept override { return true; }

  void gather(std::uint64_t, std::uint64_t, std::byte*) const override { throw on_device(); }
  at::Tensor part(std::uint64_t, std::uint64_t) override { throw on_device(); }

  void copy_to_host(std::uint64_t at, std::uint64_t size, Copied copied) override {
    const FuturePtr earlier = device_->devices->side->earlier();
    if (!stands(SyncEdge::io_source_wait) || earlier->device_work_finished()) {
      return copy(device_, at, size, copied, earlier->late_error());
    }
    when_finished(earlier, [device = device_, at, size, copied = std::move(copied)](std::exception_ptr error) {
      // The allocation of pinned memory may block, so it does not run on the watcher's thread.
      call_elsewhere([=] { copy(device, at, size, copied, error); });
    });
  }

 private:
  struct Bytes {
    std::shared_ptr<OnDevices> devices;
    io::Memory memory;
  };

  static Failure on_device() {
    return Failure({Problem::Kind::invalid_state, "the tensor is on a device: copy its bytes to the host first"});
  }

  static void copy(const std::shared_ptr<Bytes>& device, std::uint64_t at, std::uint64_t size, const Copied& copied,
                   std::exception_ptr error) noexcept {
    at::Tensor bytes;
    FuturePtr copying;
    if (error == nullptr) {
      try {
        bytes = size == 0 ? new_bytes(0) : empty_pinned(size);
        if (size != 0) copying = device->devices->side->gather(device->memory, at, size, bytes);
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (error != nullptr) return copied({}, std::move(error));
    if (copying == nullptr || !stands(SyncEdge::io_source_copied)) return copied(std::move(bytes), nullptr);
    when_finished(copying, [device, copied, bytes](std::exception_ptr failure) {
      copied(failure == nullptr ? bytes : at::Tensor(), failure);
    });
  }

  const std::shared_ptr<Bytes> device_;
};

}  // namespace

std::vector<std::shared_ptr<Source>> sources_of(_object* tensors, int priority) {
  return call_with_gil([&] {
    refuse_after_fork();
    bind::expect_priority(priority);
    std::vector<bind::CheckedTensor> all;
    bind::nb::list on_devices;
    for (bind::nb::handle object : bind::nb::handle(tensors)) {
      all.push_back(bind::check_tensor(object, Direction::write));
      if (!all.back().tensor.is_cpu()) on_devices.append(object);
    }
    std::shared_ptr<OnDevices> devices;
    std::deque<io::Memory> memory;
    if (on_devices.size() != 0) {
      bind::Tensors taken = bind::take_tensors(on_devices, Direction::write, priority);
      memory = std::move(taken.memory);
      devices = std::make_shared<OnDevices>(OnDevices{bind::foreign(taken.kept()), std::move(taken.device)});
    }
    std::vector<std::shared_ptr<Source>> sources;
    for (bind::CheckedTensor& checked : all) {
      if (checked.tensor.is_cpu()) {
        sources.push_back(std::make_shared<HostSource>(std::move(checked)));
      } else {
        sources.push_back(std::make_shared<SourceOnDevice>(checked.tensor, devices, std::move(memory.front())));
        memory.pop_front();
      }
    }
    return sources;
  });
}

}  // namespace cudafuture::api
