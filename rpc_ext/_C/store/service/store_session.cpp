#include "store/service/store_session.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "clock.h"

namespace rpc_ext::store {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::uint64_t kLeastBuffer = 1 << 16;  // bytes from which on a buffer of a pool costs less than new memory

}  // namespace

StoreSession::StoreSession(std::shared_ptr<Namespace> space, std::shared_ptr<RequestOrder> order,
                           std::uint64_t buffered, SetTimer set_timer)
    : space(std::move(space)),
      order(std::move(order)),
      heard(now()),
      uploads_(std::make_shared<Uploads>(this->space, this->order)),
      pool_(api::make_buffer_pool(buffered)),
      set_timer_(std::make_shared<SetTimer>(std::move(set_timer))),
      timer_at_(kNever) {}

void StoreSession::put(const KeyEntry& entry, at::Tensor data, Uploads::Ended ended) {
  if (uploads_->put(entry, std::move(data), std::move(ended))) note_deadline(entry.expires);
}

void StoreSession::abandon(const KeyEntry& entry) {
  {
    KeptReads::node_type dropped;  // without the lock
    const std::lock_guard lock(mutex_);
    dropped = kept_.extract(entry.sequence);
  }
  uploads_->fail(entry.sequence, {.kind = Problem::Kind::timeout,
                                  .message = "the client abandoned the write of key '" + entry.key + "'"});
  order->pass_on(entry.key, entry.sequence);
}

void StoreSession::end() {
  pool_->close();
  uploads_->end();
  KeptReads kept;
  std::shared_ptr<SetTimer> timer;
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  kept.swap(kept_);
  timer.swap(set_timer_);
}

// ---- kept reads

void StoreSession::keep(const KeyEntry& entry, const FoundTensor& tensor, bool has_first) {
  std::vector<bool> is_left(parts_of(tensor.nbytes), true);
  if (has_first) is_left[0] = false;
  const std::size_t left = is_left.size() - (has_first ? 1 : 0);
  {
    const std::lock_guard lock(mutex_);
    if (has_ended_) return;
    kept_.insert_or_assign(entry.sequence,
                           KeptRead{{tensor, entry.key, entry.needs_digest}, std::move(is_left), left, entry.expires});
  }
  note_deadline(entry.expires);
}

std::optional<StoreSession::Kept> StoreSession::take(std::uint64_t sequence, std::uint32_t part) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(sequence);
  if (found == kept_.end() || part >= found->second.is_left.size() || !found->second.is_left[part]) return std::nullopt;
  KeptRead& read = found->second;
  read.is_left[part] = false;
  Kept kept = read.kept;
  if (--read.left == 0) kept_.erase(found);
  return kept;
}

// ---- buffers

void StoreSession::take_buffer(std::uint64_t nbytes, double expires, Taken taken) {
  if (nbytes < kLeastBuffer) {
    const c10::InferenceMode plain(false);
    taken(at::empty({static_cast<std::int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte).device(c10::kCPU)));
    return;
  }
  const auto wait = std::make_shared<BufferWait>(BufferWait{expires});
  std::function<void()> cancel =
      pool_->take(nbytes, [self = shared_from_this(), wait, taken = std::move(taken)](at::Tensor data) {
        self->end_wait(wait);
        taken(std::move(data));
      });
  if (!cancel) return;
  {
    const std::lock_guard lock(mutex_);
    if (wait->is_over) return;  // it was served meanwhile
    wait->cancel = std::move(cancel);
    waits_.insert(wait);
  }
  note_deadline(expires);
}

void StoreSession::end_wait(const BufferWaitPtr& wait) {
  const std::lock_guard lock(mutex_);
  wait->is_over = true;
  waits_.erase(wait);
}

// ---- deadlines

void StoreSession::note_deadline(double expires) {
  if (expires == 0) return;
  const double seconds = std::max(order->left(expires), 0.0);
  const double at = now() + seconds;
  std::shared_ptr<SetTimer> set_timer;
  {
    const std::lock_guard lock(mutex_);
    if (at >= timer_at_) return;
    timer_at_ = at;
    set_timer = set_timer_;
  }
  if (set_timer == nullptr) return;
  (*set_timer)(seconds, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    const std::lock_guard lock(self->mutex_);
    self->timer_at_ = kNever;  // the next deadline tries again
  });
}

std::optional<double> StoreSession::look() {
  std::vector<std::function<void()>> over;
  UploadList uploads;
  double due = kNever;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(kept_, [&](const auto& item) {
      const double left = order->left(item.second.expires);
      if (left > 0) due = std::min(due, left);
      return left <= 0;
    });
    for (const BufferWaitPtr& wait : waits_) {
      const double left = order->left(wait->expires);
      if (left > 0) {
        due = std::min(due, left);
      } else {
        over.push_back(wait->cancel);  // which ends the wait
      }
    }
    due = std::min(due, uploads_->find_expired(uploads));
    timer_at_ = now() + due;
  }
  for (const auto& upload : uploads) upload->expire();
  for (const auto& cancel : over) cancel();
  return due == kNever ? std::nullopt : std::optional(due);
}

}  // namespace rpc_ext::store
