// Runs a package of `vitrail export --to aoti --out m.pt2` on a binary PPM image: ./aoti m.pt2 cat.ppm
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>

at::Tensor read_ppm(const char* path) {  // uint8 [1, height, width, 3]
  std::ifstream file(path, std::ios::binary);
  std::string magic;
  int64_t width = 0, height = 0, largest = 0;
  file >> magic >> width >> height >> largest;
  TORCH_CHECK(magic == "P6" && largest == 255 && width > 0 && height > 0, path, " is not a binary PPM image of 8 bits");
  file.get();  // one separator before the pixels
  at::Tensor pixels = torch::empty({1, height, width, 3}, torch::kUInt8);
  file.read(reinterpret_cast<char*>(pixels.data_ptr<uint8_t>()), pixels.numel());
  TORCH_CHECK(file.gcount() == pixels.numel(), path, " is truncated");
  return pixels;
}

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: aoti m.pt2 image.ppm\n";
    return 2;
  }
  c10::InferenceMode mode;
  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  std::vector<at::Tensor> outputs = model.run({read_ppm(arguments[2])});
  at::Tensor probabilities = outputs.at(0)[0].softmax(0);
  auto [values, indices] = probabilities.topk(std::min<int64_t>(5, probabilities.numel()));
  for (int64_t rank = 0; rank < values.numel(); ++rank)
    std::cout << indices[rank].item<int64_t>() << ' ' << values[rank].item<float>() << '\n';
}
