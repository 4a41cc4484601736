#include "store.h"

#include <string_view>

namespace rpc_ext {
namespace {

bool is_of_the_end(std::string_view key) { return key.starts_with("shutdown/"); }

}  // namespace

c10::intrusive_ptr<c10d::Store> AgentStore::clone() {
  return c10::make_intrusive<AgentStore>(store_->clone(), world_size_);
}

void AgentStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  if (!is_of_the_end(key)) store_->set(key, value);
}

std::vector<std::uint8_t> AgentStore::get(const std::string& key) {
  if (!is_of_the_end(key)) return store_->get(key);
  const std::lock_guard lock(mutex_);
  const std::string sum = std::to_string(sums_[key]);
  return {sum.begin(), sum.end()};
}

std::int64_t AgentStore::add(const std::string& key, std::int64_t value) {
  if (!is_of_the_end(key)) return store_->add(key, value);
  const std::lock_guard lock(mutex_);
  return sums_[key] += value * world_size_;
}

void AgentStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

void AgentStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  if (keys.size() != 1 || !is_of_the_end(keys.front())) store_->wait(keys, timeout);
}

}  // namespace rpc_ext
