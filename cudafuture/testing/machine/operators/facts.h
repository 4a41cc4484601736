// Facts from the schema of an operator, computed once and kept for the life of the process.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "machine/operators/layout.h"
#include "machine/operators/signature.h"

namespace machine {

struct Argument {
  bool written = false;    // out=, in place, or behind the schema's back
  bool is_tensor = false;  // a tensor, perhaps none, or a list of them
  bool is_number = false;  // a Scalar, or a list of them
  bool out = false;        // keyword-only and written: may be resized
};

struct Facts {
  explicit Facts(const c10::OperatorHandle& handle);

  c10::OperatorHandle op;
  c10::OperatorName key;
  std::string name;  // without the overload, as in "aten::add"
  std::vector<Argument> arguments;
  std::vector<int> returned;        // for each return: the argument that it is, or -1: a new tensor
  int generator = -1;               // the argument that is one
  bool has_new = false;             // makes new tensors
  bool is_view = false;             // its result shares memory with an argument, and is not written
  bool random = false;              // draws random numbers
  bool numbers_matter = false;      // the shapes of results may depend on Scalars
  bool shows_values = false;        // its result depends on values in memory: a number, or a tensor of unknown size
  bool may_show_values = false;     // its tags say so, which is not true of all arguments, or of CUDA's kernel
  bool takes_host_tensors = false;  // of any size: they are read when it is called

  // Returns the known results for these shapes of its arguments; null: none are known.
  std::shared_ptr<const Results> known(const Signature& signature) const;
  void remember(Signature&& signature, std::shared_ptr<const Results> results) const;

 private:
  void read_returns();
  void read_name();

  mutable std::mutex mutex_;  // guards what follows
  mutable SignatureMap<std::shared_ptr<const Results>> results_;
};

const Facts& facts_of(const c10::OperatorHandle& op);
const Facts& facts_of(const char* name, const char* overload = "");

}  // namespace machine
