// One operator as work: what its kernel for the host needs, and where what it makes goes.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "machine/operators/facts.h"
#include "machine/operators/values.h"
#include "sim/ops/access_list.h"
#include "sim/ops/alias.h"

namespace sim {

class OperatorTask {
 public:
  // `op` says what runs: the operator that was called, or another one with the same arguments. Tensors of the host's
  // are read now, and seeds drawn.
  OperatorTask(const Facts& op, c10::ArrayRef<c10::IValue> arguments, int device);

  void write_new(const c10::IValue& made);  // what the operator makes goes there: device tensors, one for each return
  void run();                               // once; afterwards:
  Values& results() noexcept { return stack_; }

  // A tensor that is written. Some kernels let one grow for a while, which moves it.
  struct Written {
    at::Tensor alias;
    void* data;
    std::int64_t numel;

    bool moved() const { return alias.storage().data() != data; }
  };
  const std::vector<Written>& written() const noexcept { return written_; }
  void move_back();  // what has moved, once it has run

  AccessList& accesses() noexcept { return accesses_; }
  Aliases& aliases() noexcept { return aliases_; }

 private:
  c10::IValue prepared(const c10::IValue& value, bool writes);

  const Facts& facts_;
  Aliases aliases_;
  AccessList accesses_;
  Values stack_;
  Values made_;
  std::vector<Written> written_;
  std::optional<std::uint64_t> host_seed_;
};

}  // namespace sim
