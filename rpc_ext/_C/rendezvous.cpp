#include "rendezvous.h"

#include <algorithm>
#include <stdexcept>

namespace rpc_ext {
namespace {

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

AgentRendezvous::AgentRendezvous(std::vector<std::string> names, py::object exchange)
    : names_(std::move(names)), exchange_(std::move(exchange)) {
  for (std::size_t rank = 0; rank < names_.size(); rank++) values_["names/" + std::to_string(rank)] = names_[rank];
}

c10::intrusive_ptr<c10d::Store> AgentRendezvous::clone() {
  throw std::logic_error("the store of an agent cannot be cloned");
}

void AgentRendezvous::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  const std::string text(value.begin(), value.end());
  if (key.starts_with("addrs/")) {
    exchange_addresses(text);
  } else {
    const std::lock_guard lock(mutex_);
    values_[key] = text;
  }
}

void AgentRendezvous::exchange_addresses(const std::string& own) {
  std::vector<std::string> addresses;
  {
    const Gil gil;
    if (!gil) throw std::runtime_error("the process is ending");
    addresses = exchange_.get()(own).cast<std::vector<std::string>>();
    exchange_.drop();
  }
  const std::lock_guard lock(mutex_);
  for (std::size_t rank = 0; rank < names_.size(); rank++) values_["addrs/" + names_[rank]] = addresses.at(rank);
}

std::vector<std::uint8_t> AgentRendezvous::compareSet(const std::string& key, const std::vector<std::uint8_t>& current,
                                                      const std::vector<std::uint8_t>& value) {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end() ? current.empty() : bytes_of(found->second) == current) {
    values_[key] = {value.begin(), value.end()};
  }
  return bytes_of(values_[key]);
}

std::vector<std::uint8_t> AgentRendezvous::get(const std::string& key) {
  const std::lock_guard lock(mutex_);
  if (key.starts_with("shutdown/")) return bytes_of(std::to_string(sums_[key]));
  return bytes_of(values_.at(key));
}

std::int64_t AgentRendezvous::add(const std::string& key, std::int64_t value) {
  const std::lock_guard lock(mutex_);
  return sums_[key] += value * static_cast<std::int64_t>(names_.size());
}

bool AgentRendezvous::deleteKey(const std::string& key) {
  const std::lock_guard lock(mutex_);
  return values_.erase(key) + sums_.erase(key) > 0;
}

bool AgentRendezvous::check(const std::vector<std::string>& keys) {
  const std::lock_guard lock(mutex_);
  return std::all_of(keys.begin(), keys.end(), [this](const std::string& key) { return values_.contains(key); });
}

std::int64_t AgentRendezvous::getNumKeys() {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(values_.size());
}

// The agent waits for keys that this store has from the start.
void AgentRendezvous::wait(const std::vector<std::string>&) {}
void AgentRendezvous::wait(const std::vector<std::string>&, const std::chrono::milliseconds&) {}

}  // namespace rpc_ext
