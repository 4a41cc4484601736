// A temporary folder for a test's files.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "rules.h"

class Folder {
 public:
  Folder() { REQUIRE(::mkdtemp(name_.data()) != nullptr); }
  ~Folder() { std::filesystem::remove_all(name_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return name_; }
  std::string file() const { return name_ + "/file"; }

 private:
  std::string name_ = "/tmp/cudafuture-XXXXXX";
};
