{
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  charts.show({ figures: read("figures"), choices: read("choices"), details: read("details") });
}
