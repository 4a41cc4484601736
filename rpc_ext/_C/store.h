#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "python.h"

namespace rpc_ext {

// The job's store as torch's agent sees it. None of it is in a store that others could write to: names and addresses of
// the workers come from what the workers have signed.
//
// torch's agent asks for four things. The names of the workers, by rank. Their addresses: it shows its own, and
// `exchange(address)` returns those of all, by rank. Whether all workers know that nobody joins later: they do. And it
// counts workers that end, under "shutdown/", to wait for all. Workers of ours have met before that, by Handshake, so
// the answer is at once that all others have done what this one does.
class AgentStore final : public c10d::Store {
 public:
  // `exchange` is called once, without the GIL.
  AgentStore(std::vector<std::string> names, py::object exchange);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  using c10d::Store::compareSet;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& current,
                                       const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  void exchange_addresses(const std::string& own);

  const std::vector<std::string> names_;
  Held exchange_;
  std::mutex mutex_;  // guards what follows; a leaf
  std::map<std::string, std::string> values_;
  std::map<std::string, std::int64_t> sums_;  // of all workers
};

}  // namespace rpc_ext
