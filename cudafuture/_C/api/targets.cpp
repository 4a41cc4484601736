// Targets of reads: Python's tensors, or new ones, which are filled on any thread.
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <utility>

#include "api/implementation.h"
#include "api/tensors.h"
#include "bind/future.h"
#include "bind/tensors.h"
#include "core/pinned_memory.h"
#include "core/process.h"
#include "core/stream_pool.h"
#include "io/aligned.h"
#include "io/device.h"

namespace cudafuture::api {
namespace {

using io::Direction;

struct Target {
  std::optional<io::Shape> shape;           // of a tensor that the caller has given; none: a new tensor
  std::uint64_t nbytes = 0;                 // of a given tensor
  std::optional<bind::HostMemory> on_host;  // of a given tensor
  io::Memory memory;                        // of a new tensor, or of a given one on a device
  at::Tensor tensor;                        // a new one
};

// The tensors of the caller are dropped last.
class NativeTargets final : public Targets {
 public:
  // `device`: of the tensors that begin() makes.
  NativeTargets(std::size_t count, std::optional<c10::Device> device, int priority) : device_(device), targets_(count) {
    const bind::WithoutGil released;
    if (device) side_ = std::make_shared<io::DeviceSide>(*device, Direction::read, priority);
  }

  // Takes the tensors of the caller.
  NativeTargets(std::size_t count, bind::nb::handle outs, int priority) : targets_(count) {
    bind::nb::list all, on_devices;
    for (bind::nb::handle out : outs) {
      bind::check_tensor(out, Direction::read);
      all.append(out);
      if (!THPVariable_Unpack(out.ptr()).is_cpu()) on_devices.append(out);
    }
    if (all.size() != count) throw bind::nb::value_error("expected one tensor to read into for each result");
    std::deque<io::Memory> memory;
    if (on_devices.size() != 0) {
      bind::Tensors taken = bind::take_tensors(on_devices, Direction::read, priority);
      memory = std::move(taken.memory);
      keep_ = bind::foreign(taken.kept());
      side_ = std::move(taken.device);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const at::Tensor& tensor = THPVariable_Unpack(bind::nb::handle(all[i]).ptr());
      Target& target = targets_[i];
      target.shape = {tensor.scalar_type(), {tensor.sizes().begin(), tensor.sizes().end()}};
      target.nbytes = tensor.nbytes();
      if (tensor.is_cpu()) {
        target.on_host.emplace(tensor, Direction::read);
      } else {
        target.memory = std::move(memory.front());
        memory.pop_front();
      }
    }
    given_ = bind::foreign(count == 1 ? bind::nb::object(all[0]) : std::move(all));
  }

  std::size_t size() const noexcept override { return targets_.size(); }

  std::optional<std::uint64_t> nbytes(std::size_t i) const noexcept override {
    const Target& target = targets_[i];
    return target.shape ? std::optional(target.nbytes) : std::nullopt;
  }

  void begin(std::size_t i, c10::ScalarType dtype, const std::vector<std::int64_t>& sizes) override {
    Target& target = targets_[i];
    const io::Shape shape = shape_from(dtype, sizes);
    if (target.shape) {
      if (*target.shape != shape) throw value_failure(bind::differ(shape, *target.shape));
      return;
    }
    target.memory = {};
    if (device_) {
      target.tensor = side_->new_target(shape, *device_, target.memory);
    } else {
      target.tensor = io::make_tensor_on_host(shape);
      target.memory.add(target.tensor.mutable_data_ptr(), target.tensor.nbytes());
    }
  }

  void fill(std::size_t i, std::uint64_t at, const at::Tensor& bytes) override {
    const std::size_t size = bytes.nbytes();
    if (size == 0) return;
    const Target& target = targets_[i];
    if (target.on_host) {
      if (const auto fault = target.on_host->fault()) throw value_failure(*fault);
      target.on_host->memory().scatter(at, size, static_cast<const std::byte*>(bytes.const_data_ptr()));
    } else if (side_ == nullptr) {
      target.memory.scatter(at, size, static_cast<const std::byte*>(bytes.const_data_ptr()));
    } else {
      const at::Tensor pinned = empty_pinned(size);  // torch's allocator keeps it until the copy has finished
      std::memcpy(pinned.mutable_data_ptr(), bytes.const_data_ptr(), size);
      call_core([&] { side_->scatter(target.memory, at, pinned); });
    }
  }

  bool adopt(std::size_t i, const at::Tensor& tensor) override {
    if (targets_[i].shape || device_) return false;
    targets_[i].tensor = tensor;
    return true;
  }

  void complete(Promise& promise, bool gives_list) noexcept override {
    auto& native = static_cast<NativePromise&>(promise);
    std::exception_ptr error;
    EventSet events;
    if (side_ != nullptr) events = side_->end_read(error);
    for (Target& target : targets_) target.memory = {};  // the future alone owns the new tensors
    if (error != nullptr) {
      native.fail(Value::of_error(std::move(error)), std::move(events));
    } else {
      native.complete(value(gives_list), std::move(events));
    }
  }

  void fail(Promise& promise, _object* exception) noexcept override {
    auto failure = std::make_exception_ptr(Failure({}));  // the read's own error, whatever it is
    EventSet events;
    if (side_ != nullptr) events = side_->end_read(failure);
    static_cast<NativePromise&>(promise).fail(exception, std::move(events));
  }

 private:
  Value value(bool gives_list) {
    if (given_ && gives_list == (targets_.size() != 1)) return Value::of_object(std::move(given_));
    if (given_)
      return Value::of_native(c10::List<at::Tensor>({THPVariable_Unpack(static_cast<PyObject*>(given_.get()))}));
    if (!gives_list) return Value::of_native(std::move(targets_.front().tensor));
    c10::List<at::Tensor> tensors;
    for (Target& target : targets_) tensors.push_back(std::move(target.tensor));
    return Value::of_native(std::move(tensors));
  }

  Foreign keep_;   // the owners of memory on devices
  Foreign given_;  // the tensor of the caller, or the list of several; none: new tensors
  const std::optional<c10::Device> device_;
  std::shared_ptr<io::DeviceSide> side_;  // null: all tensors are on the host
  std::vector<Target> targets_;
};

class HostResults final : public Results {
 public:
  explicit HostResults(bind::nb::handle tensor)
      : tensor_(bind::foreign(bind::nb::borrow(tensor))), memory_(tensor_of(), Direction::read) {}

  void set(const void* data, std::size_t size) override {
    if (memory_.fault() || tensor_of().nbytes() != size) {
      throw value_failure("the tensor for the results was resized: it no longer has an element for each");
    }
    if (size != 0) memory_.memory().scatter(0, size, static_cast<const std::byte*>(data));
  }

 private:
  const at::Tensor& tensor_of() const { return THPVariable_Unpack(static_cast<PyObject*>(tensor_.get())); }

  const Foreign tensor_;
  const bind::HostMemory memory_;
};

std::optional<c10::Device> device_with_streams(_object* device) {
  if (device == nullptr || device == Py_None) return std::nullopt;
  const c10::Device found = bind::device_from(device);
  if (found.is_cpu()) return std::nullopt;
  if (has_streams(found)) return found;
  throw bind::nb::value_error(
      ("no streams on " + found.str() + ": name an accelerator that is present, or the host").c_str());
}

}  // namespace

std::shared_ptr<Targets> targets_of(std::size_t count, _object* outs, _object* device, int priority) {
  return call_with_gil([&]() -> std::shared_ptr<Targets> {
    refuse_after_fork();
    bind::expect_priority(priority);
    if (outs != nullptr && outs != Py_None)
      return std::make_shared<NativeTargets>(count, bind::nb::handle(outs), priority);
    return std::make_shared<NativeTargets>(count, device_with_streams(device), priority);
  });
}

std::shared_ptr<Results> results_in(_object* tensor) {
  return call_with_gil([&] { return std::make_shared<HostResults>(tensor); });
}

}  // namespace cudafuture::api
