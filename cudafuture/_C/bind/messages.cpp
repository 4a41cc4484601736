// Messages between two ranks of a c10d backend with send and recv, such as Gloo's: numbers, and tensors of bytes.
//
//     send_message ──► numbers, and the sizes of the parts ──► the parts ──► receive_message
//
// The numbers have a fixed size on their way, so that the receiver need not know what comes. A thread that waits here
// holds no GIL.
#include <ATen/ops/empty.h>
#include <nanobind/stl/vector.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bind/conduit.h"
#include "bind/future.h"
#include "core/thread_cache.h"

namespace cudafuture::bind {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr std::int64_t kFirst = 32;  // numbers in the first tensor; more follow in a second one
constexpr int kTag = 0;
constexpr std::chrono::milliseconds kAnyTime = std::chrono::hours(24 * 10'000);

BackendPtr backend_behind(nb::handle object) {
  return BackendPtr::unsafe_reclaim_from_nonowning(behind<c10d::Backend>(object));
}

at::Tensor empty_numbers(std::int64_t count) { return at::empty({count}, at::TensorOptions().dtype(at::kLong)); }

// A message that was begun. A thread that waits for the backend keeps its tensors, which must not change until then.
class RankMessage {
 public:
  RankMessage(const BackendPtr& backend, int rank, const std::vector<std::int64_t>& numbers,
              std::vector<at::Tensor> parts)
      : state_(std::make_shared<State>()) {
    const auto header_size = static_cast<std::int64_t>(2 + numbers.size() + parts.size());
    const at::Tensor header = empty_numbers(std::max(header_size, kFirst));
    auto* at = header.mutable_data_ptr<std::int64_t>();
    *at++ = static_cast<std::int64_t>(numbers.size());
    *at++ = static_cast<std::int64_t>(parts.size());
    for (const std::int64_t number : numbers) *at++ = number;
    for (const at::Tensor& part : parts) *at++ = part.numel();
    Posted posted;
    posted.send(*backend, rank, header.narrow(0, 0, kFirst));
    if (header_size > kFirst) posted.send(*backend, rank, header.narrow(0, kFirst, header_size - kFirst));
    for (const at::Tensor& part : parts) {
      if (part.numel() > 0)
        posted.send(*backend, rank, part.alias());  // without Python's object: no thread takes the GIL
    }
    ThreadCache::get().run_or_call("cudafuture-send", [state = state_, posted = std::move(posted)]() mutable noexcept {
      const ParkingScope parking;       // the last owner of a storage takes the GIL
      ThreadCache::set_leavable(true);  // a peer that is stopped receives nothing
      const bool failed = !posted.wait();
      posted = Posted();
      const std::lock_guard lock(state->mutex);
      state->has_failed = failed;
      state->is_done = true;
      state->done.notify_all();
    });
  }

  // Waits until the message was sent; returns false after `timeout` seconds. Throws if it could not be sent.
  bool wait(double timeout) {
    const WithoutGil released;
    std::unique_lock lock(state_->mutex);
    state_->done.wait_for(lock, std::chrono::duration<double>(timeout), [this] { return state_->is_done; });
    if (state_->has_failed) throw std::runtime_error("the message could not be sent");
    return state_->is_done;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable done;
    bool is_done = false;
    bool has_failed = false;
  };

  struct Posted {
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;

    void send(c10d::Backend& backend, int rank, at::Tensor tensor) {
      std::vector<at::Tensor> one{std::move(tensor)};
      works.push_back(backend.send(one, rank, kTag));
      tensors.push_back(std::move(one.front()));
    }
    bool wait() noexcept {
      try {
        for (const WorkPtr& work : works) work->wait(kAnyTime);
        return true;
      } catch (const std::exception&) {  // the connection is lost, which the receiver of the other direction reports
        return false;
      }
    }
  };

  std::shared_ptr<State> state_;
};

RankMessage* send_message(nb::handle backend, int rank, const std::vector<std::int64_t>& numbers,
                          const std::vector<nb::handle>& parts) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(parts.size());
  for (const nb::handle part : parts) {
    if (!THPVariable_Check(part.ptr())) throw nb::type_error("parts are tensors");
    tensors.push_back(THPVariable_Unpack(part.ptr()));
  }
  const BackendPtr own = backend_behind(backend);
  const WithoutGil released;
  return new RankMessage(own, rank, numbers, std::move(tensors));
}

// Receives into tensors, all of which are posted before the first is waited for.
void receive(c10d::Backend& backend, int rank, const std::vector<at::Tensor>& tensors) {
  std::vector<WorkPtr> works;
  works.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    std::vector<at::Tensor> one{tensor};
    works.push_back(backend.recv(one, rank, kTag));
  }
  for (const WorkPtr& work : works) work->wait(kAnyTime);
}

nb::tuple receive_message(nb::handle backend, int rank) {
  const BackendPtr own = backend_behind(backend);
  std::vector<std::int64_t> header(kFirst);
  std::vector<at::Tensor> parts;
  {
    const WithoutGil released;
    const at::Tensor first = empty_numbers(kFirst);
    receive(*own, rank, {first});
    std::copy_n(first.const_data_ptr<std::int64_t>(), kFirst, header.begin());
    const std::int64_t size = 2 + header[0] + header[1];
    if (size > kFirst) {
      const at::Tensor rest = empty_numbers(size - kFirst);
      receive(*own, rank, {rest});
      const auto* const at = rest.const_data_ptr<std::int64_t>();
      header.insert(header.end(), at, at + rest.numel());
    }
    for (std::int64_t i = 2 + header[0]; i < size; ++i) {
      parts.push_back(at::empty({header[i]}, at::TensorOptions().dtype(at::kByte)));
    }
    receive(*own, rank, parts);
  }
  nb::list numbers;
  for (std::int64_t i = 2; i < 2 + header[0]; ++i) numbers.append(header[i]);
  return nb::make_tuple(std::move(numbers), nb::steal(THPVariable_WrapList(parts)));
}

}  // namespace

void bind_messages(nb::module_& m) {
  nb::class_<RankMessage>(m, "RankMessage").def("wait", &RankMessage::wait, nb::arg("timeout"));
  m.def("send_message", send_message, nb::arg("backend"), nb::arg("rank"), nb::arg("numbers"), nb::arg("parts"),
        nb::rv_policy::take_ownership);
  m.def("receive_message", receive_message, nb::arg("backend"), nb::arg("rank"));
}

}  // namespace cudafuture::bind
