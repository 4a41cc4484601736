#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <mutex>
#include <string>

namespace rpc_ext {

// The job's store as torch's agent sees it. Workers whose agents end wait for each other at keys that they number by
// how often each process has done so before, for as long as the store lets them: those that have done so more or less
// often never meet. Workers of ours have met before, with a limit, by Exchange; so under "shutdown/" this store answers
// at once, as if all others did what this one does.
class AgentStore final : public c10d::Store {
 public:
  AgentStore(c10::intrusive_ptr<c10d::Store> store, int world_size)
      : store_(std::move(store)), world_size_(world_size) {}

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  using c10d::Store::compareSet;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& current,
                                       const std::vector<std::uint8_t>& value) override {
    return store_->compareSet(key, current, value);
  }
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  std::int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  const std::chrono::milliseconds& getTimeout() const noexcept override { return store_->getTimeout(); }
  void setTimeout(const std::chrono::milliseconds& timeout) override { store_->setTimeout(timeout); }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int world_size_;
  std::mutex mutex_;                          // guards sums_; a leaf
  std::map<std::string, std::int64_t> sums_;  // of all workers
};

}  // namespace rpc_ext
