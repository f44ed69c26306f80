// Starts the page: every part once, then the place that the address names.

startTheme();
startHeader();
startCharts();
startList();
startTokens();
startKeys();
startDialogs();
arrive();
addEventListener("hashchange", () => {
  if (addressOf(state) !== location.hash) arrive();
});
