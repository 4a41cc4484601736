#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "python.h"

namespace rpc_ext {

// The job's store as torch's agent sees it. No other process can write to it: the names and addresses of the workers
// come from messages that the workers have signed.
//
// torch's agent asks for four things:
//   the names of the workers, by rank;
//   their addresses: the agent gives its own, and `exchange(address)` returns all of them, by rank;
//   a flag that all workers know that no worker joins later: it is always set;
//   a count of the workers that end, under "shutdown/", to wait for all. Our workers have synchronized before that, by
//     Handshake, so the store at once counts all other workers as well as this one.
class AgentRendezvous final : public c10d::Store {
 public:
  // `exchange` is called once, without the GIL.
  AgentRendezvous(std::vector<std::string> names, py::object exchange);

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
