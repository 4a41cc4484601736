// Messages between two ranks of a c10d backend with send and recv, such as Gloo's: numbers, and tensors of bytes.
//
//     RankMessageSender ──► numbers, the sizes of the parts, small parts ──► large parts ──► RankMessageReceiver
//
// The receiver need not know what comes: it has always asked for the first kFirst bytes of the next message. A message
// that fits into them goes on its way at once, and wakes one thread; the parts of a larger one wait until the receiver
// has asked for them, too. A thread that waits here holds no GIL.
#include <ATen/EmptyTensor.h>
#include <nanobind/stl/vector.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bind/conduit.h"
#include "bind/future.h"
#include "core/process.h"
#include "core/thread_cache.h"

namespace cudafuture::bind {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr std::int64_t kFirst = 256 << 10;  // bytes: to copy them twice takes less time than to ask for them
constexpr std::size_t kMostUnseen = 16;     // messages that were sent, perhaps, before a thread looks
constexpr std::size_t kAhead = 2;           // messages that a receiver has asked for
constexpr int kFirstTag = 0;
constexpr int kPartsTag = 1;  // of what follows the first bytes: the order of each tag is its own
constexpr std::chrono::milliseconds kAnyTime = std::chrono::hours(24 * 10'000);

BackendPtr backend_behind(nb::handle object) {
  return BackendPtr::unsafe_reclaim_from_nonowning(behind<c10d::Backend>(object));
}

at::Tensor empty_bytes(std::int64_t size) { return at::detail::empty_cpu({size}, at::kByte); }

// The numbers before the parts of a message, on their way.
struct MessageHeader {
  std::int64_t count;  // of numbers
  std::int64_t parts;
  std::int64_t parts_follow;

  std::int64_t size() const { return kWords + count + parts; }
  static constexpr std::int64_t kWords = 3;
};

std::int64_t bytes_of(const std::vector<at::Tensor>& parts) {
  std::int64_t bytes = 0;
  for (const at::Tensor& part : parts) bytes += part.numel();
  return bytes;
}

// Messages to one rank. The calls of send() are ordered by their caller.
class RankMessageSender {
 public:
  RankMessageSender(nb::handle backend, int rank) : backend_(backend_behind(backend)), rank_(rank) {}
  ~RankMessageSender() {
    if (is_forked_child() || is_shut_down()) {
      new std::vector<Posted>(std::move(unseen_));  // they belong to the parent, or no thread could wait for them
    } else {
      look_at_sent();
    }
  }
  RankMessageSender(const RankMessageSender&) = delete;
  RankMessageSender& operator=(const RankMessageSender&) = delete;

  // Begins to send a message; never blocks. A thread that waits for the backend keeps the parts of a large message,
  // which must not change until then. Throws if the connection is lost.
  void send(const std::vector<std::int64_t>& numbers, const std::vector<nb::handle>& parts) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(parts.size());
    for (const nb::handle part : parts) {
      if (!THPVariable_Check(part.ptr())) throw nb::type_error("parts are tensors");
      tensors.push_back(THPVariable_Unpack(part.ptr()));
    }
    const WithoutGil released;
    MessageHeader header{static_cast<std::int64_t>(numbers.size()), static_cast<std::int64_t>(tensors.size()), 0};
    const std::int64_t header_bytes = header.size() * 8;
    const std::int64_t all_bytes = header_bytes + bytes_of(tensors);
    const bool is_small = all_bytes <= kFirst;
    header.parts_follow = !is_small;
    const at::Tensor first = empty_bytes(is_small ? all_bytes : header_bytes);
    write(first, header, numbers, tensors, is_small);
    Posted posted;
    posted.send(*backend_, rank_, first.narrow(0, 0, std::min(first.numel(), kFirst)), kFirstTag);
    if (first.numel() > kFirst) {
      posted.send(*backend_, rank_, first.narrow(0, kFirst, first.numel() - kFirst), kPartsTag);
    }
    for (const at::Tensor& part : tensors) {
      // Without Python's object: no thread takes the GIL.
      if (!is_small && part.numel() > 0) posted.send(*backend_, rank_, part.alias(), kPartsTag);
    }
    const std::lock_guard lock(mutex_);
    unseen_.push_back(std::move(posted));
    if (!is_small || unseen_.size() == kMostUnseen) look_at(std::exchange(unseen_, {}));
  }

  // Waits until all messages were sent; returns false after `timeout` seconds, or if one could not be sent.
  bool wait(double timeout) {
    const WithoutGil released;
    look_at_sent();
    std::unique_lock lock(state_->mutex);
    state_->done.wait_for(lock, std::chrono::duration<double>(timeout), [this] { return state_->waiting == 0; });
    return state_->waiting == 0 && !state_->has_failed;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable done;
    int waiting = 0;  // threads
    bool has_failed = false;
  };

  struct Posted {
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;

    void send(c10d::Backend& backend, int rank, at::Tensor tensor, int tag) {
      std::vector<at::Tensor> one{std::move(tensor)};
      works.push_back(backend.send(one, rank, tag));
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

  static void write(const at::Tensor& first, const MessageHeader& header, const std::vector<std::int64_t>& numbers,
                    const std::vector<at::Tensor>& parts, bool with_parts) {
    auto* words = reinterpret_cast<std::int64_t*>(first.mutable_data_ptr());
    for (const std::int64_t word : {header.count, header.parts, header.parts_follow}) *words++ = word;
    words = std::copy(numbers.begin(), numbers.end(), words);
    for (const at::Tensor& part : parts) *words++ = part.numel();
    if (!with_parts) return;
    auto* bytes = reinterpret_cast<std::byte*>(words);
    for (const at::Tensor& part : parts) {
      const auto* const from = static_cast<const std::byte*>(part.const_data_ptr());
      bytes = std::copy_n(from, part.numel(), bytes);
    }
  }

  void look_at_sent() {
    const std::lock_guard lock(mutex_);
    if (!unseen_.empty()) look_at(std::exchange(unseen_, {}));
  }

  // Lets a thread wait until these were sent.
  void look_at(std::vector<Posted> sent) {
    {
      const std::lock_guard lock(state_->mutex);
      ++state_->waiting;
    }
    ThreadCache::get().run_or_call("cudafuture-send", [state = state_, sent = std::move(sent)]() mutable noexcept {
      const ParkingScope parking;       // the last owner of a storage takes the GIL
      ThreadCache::set_leavable(true);  // a peer that is stopped receives nothing
      bool has_failed = false;
      for (Posted& posted : sent) {
        has_failed = !posted.wait() || has_failed;
        posted = {};
      }
      const std::lock_guard lock(state->mutex);
      state->has_failed = state->has_failed || has_failed;
      --state->waiting;
      state->done.notify_all();
    });
  }

  const BackendPtr backend_;
  const int rank_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::mutex mutex_;  // guards what follows
  std::vector<Posted> unseen_;
};

// Messages of one rank, for one thread.
class RankMessageReceiver {
 public:
  RankMessageReceiver(nb::handle backend, int rank) : backend_(backend_behind(backend)), rank_(rank) {}

  // Waits for the next message; returns its numbers and its parts. Throws if the connection is lost.
  nb::tuple receive() {
    std::vector<std::int64_t> words;
    std::vector<at::Tensor> parts;
    {
      const WithoutGil released;
      while (asked_.size() < kAhead) {
        const at::Tensor bytes = empty_bytes(kFirst);
        asked_.push_back({bytes, ask(bytes, kFirstTag)});
      }
      Asked next = std::move(asked_.front());
      asked_.pop_front();
      next.work->wait(kAnyTime);
      words = header_in(next.bytes);
      const auto count = MessageHeader::kWords + words[0];
      for (std::int64_t i = count; i < count + words[1]; ++i) parts.push_back(empty_bytes(words[i]));
      std::vector<WorkPtr> works;
      if (words[2] != 0) {
        for (const at::Tensor& part : parts) {
          if (part.numel() > 0) works.push_back(ask(part, kPartsTag));
        }
      } else {
        const auto* from = static_cast<const std::byte*>(next.bytes.const_data_ptr()) + words.size() * 8;
        for (const at::Tensor& part : parts) {
          std::copy_n(from, part.numel(), static_cast<std::byte*>(part.mutable_data_ptr()));
          from += part.numel();
        }
      }
      for (const WorkPtr& work : works) work->wait(kAnyTime);
    }
    nb::list numbers;
    for (std::int64_t i = 0; i < words[0]; ++i) numbers.append(words[MessageHeader::kWords + i]);
    return nb::make_tuple(std::move(numbers), nb::steal(THPVariable_WrapList(parts)));
  }

 private:
  struct Asked {
    at::Tensor bytes;
    WorkPtr work;  // that fills them
  };

  WorkPtr ask(const at::Tensor& tensor, int tag) {
    std::vector<at::Tensor> one{tensor};
    return backend_->recv(one, rank_, tag);
  }

  std::vector<std::int64_t> header_in(const at::Tensor& bytes) {
    const auto* const at = reinterpret_cast<const std::int64_t*>(bytes.const_data_ptr());
    const MessageHeader header{at[0], at[1], at[2]};
    std::vector<std::int64_t> words(header.size());
    const std::int64_t here = std::min(header.size(), kFirst / 8);
    std::copy_n(at, here, words.begin());
    if (here < header.size()) {
      const at::Tensor rest = empty_bytes((header.size() - here) * 8);
      ask(rest, kPartsTag)->wait(kAnyTime);
      std::copy_n(reinterpret_cast<const std::int64_t*>(rest.const_data_ptr()), header.size() - here,
                  words.begin() + here);
    }
    return words;
  }

  const BackendPtr backend_;
  const int rank_;
  std::deque<Asked> asked_;
};

}  // namespace

void bind_messages(nb::module_& m) {
  nb::class_<RankMessageSender>(m, "RankMessageSender")
      .def(nb::init<nb::handle, int>(), nb::arg("backend"), nb::arg("rank"))
      .def("send", &RankMessageSender::send, nb::arg("numbers"), nb::arg("parts"))
      .def("wait", &RankMessageSender::wait, nb::arg("timeout"));
  nb::class_<RankMessageReceiver>(m, "RankMessageReceiver")
      .def(nb::init<nb::handle, int>(), nb::arg("backend"), nb::arg("rank"))
      .def("receive", &RankMessageReceiver::receive);
}

}  // namespace cudafuture::bind
