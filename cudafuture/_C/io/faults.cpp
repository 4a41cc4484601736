#include "io/faults.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/threads.h"

namespace cudafuture::io {
namespace {

constexpr unsigned kMostRounds = 5;

// Transfers as if the kernel had been asked for fewer bytes.
std::int64_t transfer_part(const Block& block, std::size_t size) noexcept {
  Block part = block;
  std::size_t left = size;
  for (std::size_t i = 0; i < block.count; ++i) {
    iovec& piece = part.pieces[part.first + i];
    piece.iov_len = std::min(piece.iov_len, left);
    left -= piece.iov_len;
    if (left == 0) part.count = i + 1;
    if (left == 0) break;
  }
  return transfer(part);
}

}  // namespace

Faults::Faults(std::unique_ptr<Backend> real, const FaultRates& rates)
    : real_(std::move(real)), rates_(rates), random_(rates.seed), is_held_(rates.held) {}

void Faults::release_held() noexcept {
  is_held_.store(false, std::memory_order_release);
  real_->wake();
}

bool Faults::make_up(Block& block) noexcept {
  constexpr std::size_t kSector = 512;
  const auto certain = rates_.at.find(++asked_);
  if (certain != rates_.at.end()) {
    block.result = -certain->second;
  } else if (happens(rates_.io_error)) {
    block.result = -EIO;
  } else if (block.direction == Direction::write && happens(rates_.no_space)) {
    block.result = -ENOSPC;
  } else if (happens(rates_.again)) {
    block.result = -EAGAIN;
  } else if (happens(rates_.interrupted)) {
    block.result = -EINTR;
  } else if (block.count == 1 && block.size > kSector && happens(rates_.cut_short)) {
    block.result = transfer_part(block, kSector * (1 + random_() % ((block.size - 1) / kSector)));
  } else {
    return false;
  }
  return true;
}

void Faults::put(Block& block) noexcept {
  if (make_up(block)) {
    made_up_.push_back(&block);
  } else {
    real_->put(block);
  }
}

void Faults::wait(bool may_block, std::vector<Block*>& ended) noexcept {
  std::vector<Block*> come = std::exchange(made_up_, {});
  const bool is_held = is_held_.load(std::memory_order_acquire);
  real_->wait(may_block && come.empty() && (is_held || held_.empty()), come);
  for (Block* const block : come) {
    held_.push_back({block, happens(rates_.late) ? 1 + static_cast<unsigned>(random_() % kMostRounds) : 0});
  }
  if (is_held) return;
  const auto due = std::stable_partition(held_.begin(), held_.end(), [](Held& held) { return held.rounds-- > 0; });
  for (auto held = due; held != held_.end(); ++held) ended.push_back(held->block);
  held_.erase(due, held_.end());
}

}  // namespace cudafuture::io
